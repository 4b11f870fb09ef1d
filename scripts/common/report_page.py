"""A name of report.py, until its caller has moved."""

GROUP_COLOURS = dict(
    zip(
        ("GEMM", "attention", "normalisation", "element-wise", "optimizer", "copies", "other"),
        ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"),
        strict=True,
    )
)
