"""TRIAGE inside verl: import this module in the trainer and in the actor workers, and nothing else changes.

    PYTHONPATH=examples VERL_USE_EXTERNAL_MODULES=verl_triage python -m verl.trainer.main_ppo \
        actor_rollout_ref.rollout.calculate_log_probs=True \
        actor_rollout_ref.actor.policy_loss.loss_mode=halfbyte ...

``HALFBYTE_CORRECTION`` names the correction (``triage`` by default). In the trainer process the advantages of each batch are
weighed once, after verl has computed them: verl's surrogates are homogeneous in the advantage, so that is the weight of the
surrogate. In the workers the loss ``halfbyte`` is registered (verl's own losses work as well). Leave
``algorithm.rollout_correction`` off: it would apply the ratio a second time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.core_algos import register_policy_loss
from verl.trainer.ppo.v1 import trainer_base

from halfbyte.objective import Correction, PolicySettings, make_correction, make_segmenter
from halfbyte.objective.verl import make_policy_loss, rollout_weights


def corrected(compute: Callable[..., Any], correction: Correction) -> Callable[..., Any]:
    """verl's function that adds advantages to a ``DataProto``, followed by a correction with a memory of its own."""
    segmenter, now = make_segmenter("fixed"), correction

    def with_weights(data: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal now
        data = compute(data, *arguments, **named)
        done = rollout_weights(data.batch, now, segmenter=segmenter)
        now = done.correction
        data.batch["advantages"] = data.batch["advantages"] * done.weights
        return data

    return with_weights


register_policy_loss("halfbyte")(make_policy_loss(PolicySettings()))
trainer_base.compute_advantage_for_multi_trajectories = corrected(
    trainer_base.compute_advantage_for_multi_trajectories,
    make_correction(os.environ.get("HALFBYTE_CORRECTION", "triage")),
)
