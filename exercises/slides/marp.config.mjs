// What `marp` does in this folder. Markers of the record, <!-- one line -->, are removed: Marp would take them for speaker's
// notes, which are comments of several lines.
const withoutMarkers = (md) =>
  md.core.ruler.before("normalize", "markers", (state) => {
    state.src = state.src.replace(/<!-- [^>\n]+ -->/g, "");
  });

export default {
  allowLocalFiles: true, // the pictures of scripts/recorded
  engine: ({ marp }) => marp.use(withoutMarkers),
  html: true,
  themeSet: ["./workshop.css"],
};
