"""Reports: one HTML file of what was done, whether it is right and how fast it is.

collect.py gathers values from what a command found; graph.py, plan.py, roofline.py, accuracy.py and
speed.py each prepare one picture; render.py puts them into the templates of templates/report.
"""

from .collect import NOTHING_REPORTED, bench_view, file_text, run_view
from .render import write_report

__all__ = ["NOTHING_REPORTED", "bench_view", "file_text", "run_view", "write_report"]
