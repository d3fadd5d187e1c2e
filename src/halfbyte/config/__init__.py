"""The configuration of a run: hand-written TOML in, resolved JSON out, every unknown key an error.

Values come from, weakest first: defaults, the file, command-line flags, ``--set section.key=value``. Nothing here
imports torch.
"""

from halfbyte.config.problems import close_names, validated
from halfbyte.config.run import Config, difference, load_config
from halfbyte.config.sections import (
    AlignmentConfig,
    EnvConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    Section,
    TrainConfig,
)

__all__ = [
    "AlignmentConfig",
    "Config",
    "EnvConfig",
    "EvalConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "Section",
    "TrainConfig",
    "close_names",
    "difference",
    "load_config",
    "validated",
]
