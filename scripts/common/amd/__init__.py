"""Execute AMD's machine instructions without an AMD GPU: README.md says what is modelled and what is not."""
