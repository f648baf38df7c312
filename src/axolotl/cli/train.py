"""`axolotl train`: the order of a run, from a checked config to a saved policy. Torch is imported inside `run`."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from axolotl import failpoints
from axolotl.cli.config import LoadedConfig, dump_config
from axolotl.cli.resume import check_data, find_checkpoint, is_best_forgotten, resume_wanted, run_record
from axolotl.core.run.checkpoints.lock import run_lock
from axolotl.core.run.checkpoints.store import CheckpointStore
from axolotl.errors import ConfigError, DataError, Interrupted, PeerError, ServerError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.link import ServerLink
from axolotl.serving.wire import ServerInfo
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import server_url, sync_dir, uses_server, versions_alive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from axolotl.core.run.output_dir import OutputDir
    from axolotl.core.run.signals import StopRequest
    from axolotl.core.trainers.grpo.assembly import Parts
    from axolotl.core.trainers.grpo.distributed import World
    from axolotl.core.trainers.grpo.rewards.function import RewardFunction
    from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
    from axolotl.data.prompts import PromptData
    from axolotl.serving.fingerprint import HasVocab
    from axolotl.serving.supervisor import ManagedServer


# A server that starts says nothing before its libraries are imported, which takes a while on a busy machine.
START_SILENCE_S = 60.0

# How long one process of a run waits for another by default.
DEFAULT_RANK_TIMEOUT_S = 1800.0

_GO_ON = "run the same command with --resume to go on"


@dataclass(frozen=True)
class TrainFlags:
    """resume: True for the newest checkpoint, or the path of one. overwrite: delete what an earlier run wrote."""

    resume: bool | str = False
    overwrite: bool = False


def run(loaded: LoadedConfig, flags: TrainFlags) -> None:
    """Train as the config says.

    Raises:
        AxolotlError: of the kind that names who has to act; what was achieved until then is on disk.
    """
    failpoints.arm(os.environ)
    failpoints.point("cfg.loaded")
    _prepare_environment(loaded.config)
    from axolotl.core.run.signals import exit_on_sigterm
    from axolotl.core.trainers.grpo.distributed import open_world

    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        gpus = _share_gpus(loaded.config)
        world = stack.enter_context(open_world(float(loaded.config.ddp_timeout or DEFAULT_RANK_TIMEOUT_S)))
        with world.telling():
            _run(loaded, flags, world, gpus, stack)


def _run(loaded: LoadedConfig, flags: TrainFlags, world: World, gpus: str | None, stack: ExitStack) -> None:
    from axolotl.core.run.faults import named_faults
    from axolotl.core.run.resumed import FollowConfig
    from axolotl.core.run.signals import StopRequest

    config = loaded.config
    resume = world.first(lambda: resume_wanted(config, resume=flags.resume, overwrite=flags.overwrite))
    output = _open_output(config, flags, resume, world, stack)
    checkpoint = world.first(lambda: find_checkpoint(config, resume))
    # The server loads while the data is prepared here.
    server = world.together(partial(_start_managed_server, loaded, output, gpus, stack) if world.is_main else _nothing)
    with named_faults(output.path):
        stop = StopRequest()
        parts = _prepare(loaded, server, stop, world, stack)
        data = parts.prompts.train.digest()
        if checkpoint is not None:
            world.together(lambda: check_data(checkpoint, config, data))
        trainer = world.together(lambda: _build(parts, output))
        # Before the client goes, whatever ends the run: its thread asks the server.
        stack.callback(trainer.pipeline.producer.close)
        trainer.checkpoints = _store(config, output, data)
        if checkpoint is not None:
            trainer.add_callback(FollowConfig(is_best_forgotten=is_best_forgotten(checkpoint, config)))
        _train(trainer, output, checkpoint, stop)
        _finish(trainer, output, config)


def _open_output(
    config: AxolotlConfig, flags: TrainFlags, resume: bool | str, world: World, stack: ExitStack
) -> OutputDir:
    """The main process holds the lock and writes the files that all share."""
    from axolotl.core.run.output_dir import RESOLVED_CONFIG, OutputDir

    path = Path(config.output_dir)

    def open_it() -> OutputDir:
        stack.enter_context(run_lock(path))
        output = OutputDir.open(path, overwrite=flags.overwrite, resume=bool(resume))
        for line in CheckpointStore(output.path).recover():
            _say(line)
        output.file(RESOLVED_CONFIG).write_text(dump_config(config))
        return output

    return world.together(open_it if world.is_main else lambda: OutputDir.shared(path))


def _store(config: AxolotlConfig, output: OutputDir, data: str) -> CheckpointStore:
    return CheckpointStore(
        output.path, limit=config.save_total_limit, record=run_record(config, data), announce=output.announce
    )


def _prepare_environment(config: AxolotlConfig) -> None:
    """What libraries read from the environment, set before they are imported."""
    # No call home that the user did not configure.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Waiting threads must not spin on the cores that a server on this machine generates with.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # TRL imports vLLM where it is installed; we do not use it through TRL, so what they say to each other is noise.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
    from axolotl.core.trainers.grpo.args import reporter_environment

    os.environ.update(reporter_environment(config))


def _share_gpus(config: AxolotlConfig) -> str | None:
    """Leave this process one GPU; returns `CUDA_VISIBLE_DEVICES` for a managed server, None for as it is."""
    from axolotl.loaders.device import plan_gpus, visible_gpus

    is_managed = uses_server(config) and config.vllm.managed
    num_for_server = config.vllm.tensor_parallel_size * config.vllm.data_parallel_size if is_managed else 0
    visible = visible_gpus()
    if visible and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            "not available yet: several processes on GPUs",
            why=f"GPUs {','.join(visible)} are visible; several processes train on CPUs only",
            do="start one process, without a launcher, or set CUDA_VISIBLE_DEVICES to nothing",
        )
    plan = plan_gpus(visible, num_for_server=num_for_server)
    if plan.note:
        _say(plan.note)
    if plan.trainer is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan.trainer
    return plan.server


def _nothing() -> None:
    return None


def _start_managed_server(
    loaded: LoadedConfig, output: OutputDir, gpus: str | None, stack: ExitStack
) -> ManagedServer | None:
    config = loaded.config
    if not uses_server(config) and config.vllm.managed:
        _say("vllm.managed has no effect: trl.use_vllm is false, so the policy generates in this process")
    if not (uses_server(config) and config.vllm.managed):
        return None
    from axolotl.core.run.output_dir import RESOLVED_CONFIG, SERVER_LOG
    from axolotl.serving.supervisor import ManagedServer, serve_command

    log = output.file(SERVER_LOG)
    _say(f"starting the generation server at {server_url(config)} (log: {log})")
    return stack.enter_context(
        ManagedServer(
            serve_command(output.path / RESOLVED_CONFIG),
            url=server_url(config),
            sync_dir=sync_dir(config),
            log_path=log,
            environment=None if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
            max_restarts=config.vllm.max_restarts,
            silence_s=max(_server_timeout(config), START_SILENCE_S),
            say=_say,
        )
    )


def _prepare(
    loaded: LoadedConfig, server: ManagedServer | None, stop: StopRequest, world: World, stack: ExitStack
) -> Parts:
    """Everything that can fail for a reason of the user's, cheapest first: data, rewards, server; the model last."""
    from axolotl.core.trainers.grpo.assembly import Parts, build_sampler
    from axolotl.core.trainers.grpo.rewards.inline import InlineRewards
    from axolotl.core.trainers.grpo.rewards.loading import check_columns, load_rewards, reward_notes
    from axolotl.core.trainers.grpo.specs import pipeline_notes
    from axolotl.data.prompts import prepare_prompts
    from axolotl.loaders.device import pick_device
    from axolotl.loaders.precision import resolve_precision
    from axolotl.loaders.tokenizer import load_tokenizer, tokenizer_notes

    config, base_dir = loaded.config, loaded.path.resolve().parent

    def read() -> tuple[tuple[RewardFunction, ...], PreTrainedTokenizerBase, PromptData]:
        functions = load_rewards(config, base_dir)
        tokenizer = load_tokenizer(config, base_dir)
        prompts = prepare_prompts(config, tokenizer, base_dir)
        check_columns(functions, prompts.train.columns)
        return functions, tokenizer, prompts

    functions, tokenizer, prompts = world.together(read)
    _require_same_data(prompts, world)
    sampler = build_sampler(config, len(prompts.train), world)
    for note in (*reward_notes(functions), *tokenizer_notes(config, tokenizer), *prompts.notes):
        _say(note)
    if sampler.left_out:
        _say(f"{sampler.left_out} of {sampler.num_prompts} prompts do not fill a step; each epoch leaves out others")
    link = _connect(config, prompts, tokenizer, server, stop, world, stack) if uses_server(config) else None
    device = pick_device()
    precision = resolve_precision(config, device)
    if precision.note:
        _say(precision.note)
    for note in pipeline_notes(config):
        _say(note)
    rewards = InlineRewards(functions)
    return Parts(config, tokenizer, prompts, rewards, device, precision, link, stop.interruptible, world)


def _require_same_data(prompts: PromptData, world: World) -> None:
    """Ranks that see other rows would take each other's prompts, or different numbers of steps."""
    if len(set(world.gather(prompts.train.digest()))) > 1:
        raise DataError(
            "the processes of the run do not read the same prompts",
            code="E-DAT-08",
            why="their data sets differ in rows, or in how a transform made prompts of them",
            do="give every process the same files, and let transforms use no randomness of their own",
        )


def _connect(
    config: AxolotlConfig,
    prompts: PromptData,
    tokenizer: HasVocab,
    server: ManagedServer | None,
    stop: StopRequest,
    world: World,
    stack: ExitStack,
) -> ServerLink:
    """Wait for the server, check that it serves our base model and means the same by a token, and claim it.

    The main process does so; the others work under its claim.
    """
    claimed: list[ServerLink] = []

    def claim() -> str:
        claimed.append(_claim(config, prompts, tokenizer, server, stop, world, stack))
        return claimed[0].directory.name

    run_id = world.first(claim)
    return world.together(lambda: claimed[0] if claimed else _join(config, run_id, tokenizer, stop, stack))


def _claim(
    config: AxolotlConfig,
    prompts: PromptData,
    tokenizer: HasVocab,
    server: ManagedServer | None,
    stop: StopRequest,
    world: World,
    stack: ExitStack,
) -> ServerLink:
    from axolotl.core.trainers.grpo.specs import sampling
    from axolotl.data.prompts import check_room
    from axolotl.serving.fingerprint import fingerprint

    timeout = _server_timeout(config)
    client = stack.enter_context(
        ServerClient(server_url(config), sync_dir(config), timeout, keeper=server, say=_say, waiting=stop.interruptible)
    )
    info = server.wait_ready(client, _say) if server is not None else client.wait_ready(_say)
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    do = "start it with vllm.max_model_len at least"
    check_room(prompts, config, info.max_model_len, name="the server's max_model_len", do=do)
    ours = fingerprint(config.base_model, config.revision_of_model, bool(config.trust_remote_code), tokenizer)
    client.claim(run_id, ours, sampling(config))
    stack.callback(client.release)
    failpoints.point("srv.handshake")
    stack.enter_context(client.renewing(for_guests=world.size > 1))
    client.require(partial(_check_limits, config))
    _say(f"generating with the {info.engine} engine at {client.url} ({info.dtype}, instance {info.instance_id})")
    return ServerLink(client, sync_dir(config) / "adapters" / run_id)


def _join(config: AxolotlConfig, run_id: str, tokenizer: HasVocab, stop: StopRequest, stack: ExitStack) -> ServerLink:
    """The server that the main process has claimed as `run_id`."""
    from axolotl.serving.fingerprint import fingerprint

    timeout = _server_timeout(config)
    client = stack.enter_context(
        ServerClient(server_url(config), sync_dir(config), timeout, say=_say, waiting=stop.interruptible)
    )
    client.wait_ready(_say)
    ours = fingerprint(config.base_model, config.revision_of_model, bool(config.trust_remote_code), tokenizer)
    client.join(run_id, ours)
    return ServerLink(client, sync_dir(config) / "adapters" / run_id)


def _server_timeout(config: AxolotlConfig) -> float:
    """The longest time without contact or token progress, in seconds."""
    return float(config.trl.vllm_server_timeout or 300)


def _check_limits(config: AxolotlConfig, info: ServerInfo) -> None:
    """Of a server, which another config may have been started with."""
    _check_rank(config, info.max_lora_rank)
    _check_versions(config, info.max_versions)


def _check_rank(config: AxolotlConfig, limit: int | None) -> None:
    if limit is not None and config.lora_r > limit:
        raise SyncError(
            f"lora_r {config.lora_r} is larger than the server's adapters may be ({limit})",
            code="E-SYN-03",
            why="the server was started with another config",
            do="restart axolotl vllm-serve with this config",
        )


def _check_versions(config: AxolotlConfig, limit: int) -> None:
    """A server that holds fewer would drop, in mid-run, a version that completions are still ordered of."""
    needed = versions_alive(config)
    if config.trl.vllm_lora_sync and needed > limit:
        raise SyncError(
            f"this run needs {needed} adapter versions on the server at once, and the server holds {limit}",
            code="E-SYN-09",
            why=f"trl.prefetch_depth is {config.trl.prefetch_depth} here; the server was started with a smaller one",
            do=f"restart axolotl vllm-serve with this config, or set trl.prefetch_depth to {limit - 2}",
        )


def _build(parts: Parts, output: OutputDir) -> AxolotlGRPOTrainer:
    from axolotl.core.builders.rl import HFRLTrainerBuilder
    from axolotl.core.run.best_metric import RequireBestMetric
    from axolotl.core.run.bookkeeping import NoteWrittenFiles
    from axolotl.core.run.journal import JOURNAL, JournalFile
    from axolotl.core.run.metrics_file import MetricsFile
    from axolotl.core.run.progress import Progress
    from axolotl.core.run.step_points import StepPoints
    from axolotl.core.run.step_record import step_record

    trainer = HFRLTrainerBuilder(parts).build()
    is_main = parts.world.is_main
    callbacks = (
        MetricsFile(output.file("metrics.jsonl")) if is_main else None,
        JournalFile(output.file(JOURNAL) if is_main else None, lambda: step_record(trainer)),
        Progress() if is_main else None,
        NoteWrittenFiles(output) if is_main else None,
        RequireBestMetric(),
        StepPoints(),
    )
    for callback in callbacks:
        if callback is not None:
            trainer.add_callback(callback)
    return trainer


def _train(trainer: AxolotlGRPOTrainer, output: OutputDir, checkpoint: Path | None, stop: StopRequest) -> None:
    from axolotl.core.run.emergency import emergency_checkpoint
    from axolotl.core.run.faults import kept
    from axolotl.core.run.signals import StopAtBoundary
    from axolotl.core.trainers.grpo.assembly import resume_rollouts

    if checkpoint is not None and _is_finished(checkpoint, trainer):
        _say(f"{checkpoint} is the end of a finished run: nothing left to train; raise max_steps to go on")
        if output.is_newest(checkpoint):
            # It may have ended after its last step, in an evaluation or while it was saved.
            trainer.restore_finished(checkpoint)
        return
    if checkpoint is not None:
        resume_rollouts(trainer, checkpoint)
    trainer.add_callback(StopAtBoundary(stop, trainer.pipeline.world.largest))
    try:
        with stop.listening(), emergency_checkpoint(trainer, output.path, is_urgent=lambda: stop.is_urgent):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except Interrupted as stopped:
        if stop.is_urgent or trainer.state.global_step < trainer.state.max_steps:
            stopped.do = _GO_ON if trainer.state.global_step > 0 else ""
            raise
        # All steps are taken: it was the evaluation after the last one, behind which the best policy would be loaded.
        trainer.restore_best()
    trainer.finite.require()
    step, last = trainer.state.global_step, trainer.state.max_steps
    # A signal after the last step changes nothing: the run is complete and is saved as one.
    if stop.received is not None and step < last:
        raise Interrupted(
            f"stopped by a signal after step {step} of {last}",
            signal_number=stop.received,
            saved=kept(output.path),
            do=_GO_ON,
        )


def _is_finished(checkpoint: Path, trainer: AxolotlGRPOTrainer) -> bool:
    """Whether the checkpoint has all steps of this config: transformers would take one more before it looks."""
    done = int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    planned = trainer.args.max_steps
    if planned <= 0:
        planned = math.ceil(trainer.args.num_train_epochs * trainer.sampler.steps_per_epoch)
    return done >= planned


def _finish(trainer: AxolotlGRPOTrainer, output: OutputDir, config: AxolotlConfig) -> None:
    from axolotl.core.run.output_dir import LAST_ERROR
    from axolotl.core.trainers.grpo.weight_sync.in_process import require_finite_weights

    failpoints.point("end")
    if trainer.state.global_step == 0:
        # Nothing was trained, and the checkpoint is not the last one: what is there stays.
        output.file(LAST_ERROR).unlink(missing_ok=True)
        trainer.pipeline.close()
        return
    # Whoever finds a model there takes it for a good one; what is not finite after the last step was never pushed.
    require_finite_weights(trainer.policy(), trainer.state.global_step)
    with output.saving():
        trainer.save_model(str(output.path))
    if uses_server(config) and not config.vllm.managed:
        # Whoever asks the server after the run gets the policy that was saved. The run itself needs it no more.
        try:
            trainer.pipeline.leave(trainer.state.global_step, is_other=trainer.holds_earlier_policy)
        except (ServerError, SyncError, PeerError) as error:
            _say(f"warning: the server does not have the policy that was saved ({error.what})")
    trainer.pipeline.close()
    trainer.pipeline.world.alone(lambda: output.file(LAST_ERROR).unlink(missing_ok=True))
    what = "adapter" if config.adapter else "model"
    _say(
        f"done: {trainer.state.global_step} steps; {what} in {output.path}, metrics in {output.path / 'metrics.jsonl'}"
    )


def _say(line: str) -> None:
    """Once for all processes of a run."""
    if os.environ.get("RANK", "0") != "0":
        return
    print(line, file=sys.stderr, flush=True)
