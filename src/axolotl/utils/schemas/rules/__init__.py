"""What no single option can know: rules about several of them, checked before anything heavy is loaded.

A rule is a function from the config to a list of problems. The loader runs `AS_WRITTEN` on the config before empty
values are resolved, `COMMON` on the resolved one, and `TRAINING` on top of that unless only a server is wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.nodes import Problem
from axolotl.utils.schemas.paths import paths_can_exist
from axolotl.utils.schemas.rules import batches, loss, model, rollouts, schedule, server

Rule = Callable[[AxolotlConfig], list[Problem]]

AS_WRITTEN: tuple[Rule, ...] = (server.one_address, loss.one_cap)
COMMON: tuple[Rule, ...] = (
    paths_can_exist,
    model.one_quantization,
    server.prompts_have_room,
    server.managed_server_is_here,
    server.server_can_load_the_adapter,
    server.server_can_take_all_weights,
    server.server_can_receive_over_nccl,
    model.head_has_no_adapter,
    model.no_plugins,
)
TRAINING: tuple[Rule, ...] = (
    rollouts.training_needs_data_and_rewards,
    model.one_attention,
    model.one_number_format,
    schedule.optimizer_reads_its_arguments,
    schedule.one_schedule,
    schedule.evaluation_drives_what_needs_it,
    schedule.best_model_is_saved,
    batches.groups_have_two,
    server.server_takes_the_group,
    batches.steps_hold_whole_groups,
    batches.rollouts_hold_whole_steps,
    rollouts.sampling_explores,
    rollouts.weights_match_rewards,
    rollouts.asynchronous_options_have_a_producer,
    rollouts.prefetching_has_a_server,
    rollouts.staleness_is_possible,
    rollouts.replay_reaches_the_next_rollout,
    loss.vespo_has_token_weights,
    loss.clip_range_is_open,
    loss.reference_can_follow,
    loss.reference_is_the_base_model,
    rollouts.gdpo_normalises_first,
)
