"""Arms x seeds on identical prompts and budgets: what a method buys, with intervals. No torch; runs are child processes."""

from halfbyte.study.analysis import analyse
from halfbyte.study.arms import BUILT_IN, Arm
from halfbyte.study.plan import Plan, load_plan
from halfbyte.study.records import RunRecord, collect_records, read_run
from halfbyte.study.schedule import Outcome, run_study

__all__ = [
    "BUILT_IN",
    "Arm",
    "Outcome",
    "Plan",
    "RunRecord",
    "analyse",
    "collect_records",
    "load_plan",
    "read_run",
    "run_study",
]
