"""What `--help` prints."""

from __future__ import annotations

GENERAL = """\
axolotl: train language models with GRPO from a YAML file and a Python reward function

usage: axolotl COMMAND [CONFIG.yaml] [--OPTION VALUE ...]

commands
  train              train the model that the config describes
  vllm-serve         start the generation server of the config; keep it running beside train
  vllm-stop          stop a generation server, the one of the config or of a port, and nothing else
  check              say whether a config is valid and what it comes to; loads no model, takes a second
  verify-checkpoint  say whether a checkpoint, or each of an output directory, is what was saved
  config-schema      print every option of the config as JSON schema, or as tables with --markdown

Every option of the config can be given as a flag and wins over the file:
  axolotl train config.yaml --learning_rate 1e-5 --trl.num_generations 4

axolotl COMMAND --help explains one command; axolotl --version prints the version.
"""

_OVERRIDES = """\
  --OPTION VALUE   set an option of the config; sections are joined by dots: --trl.beta 0.04,
                   --vllm.managed true, --datasets.0.path data.jsonl. A flag without a value means true.
                   VALUE is read as in the YAML file: lists are written '[a, b]', null empties an option."""

COMMANDS = {
    "train": f"""\
usage: axolotl train CONFIG.yaml [flags] [--OPTION VALUE ...]

Trains the model. With trl.use_vllm: true a server must be running (axolotl vllm-serve CONFIG.yaml in another
terminal), unless vllm.managed: true lets this command start and stop it.

flags
  --resume         go on from the newest checkpoint in output_dir; --resume=PATH names one
  --overwrite      delete what an earlier run left in output_dir, then start afresh
  --dry-run        print the config as it would run, with every default filled in, and stop
{_OVERRIDES}

exit codes: 0 finished, 2 config, 3 environment, 4 data, 5 reward code, 6 server, 7 adapter sync, 8 NaN,
  9 storage, 10 memory, 130 Ctrl-C and 143 SIGTERM after saving, 1 a bug of ours
""",
    "vllm-serve": f"""\
usage: axolotl vllm-serve CONFIG.yaml [--OPTION VALUE ...]

Starts the generation server with the model and the vllm: section of the config, and serves until Ctrl-C. It
outlives training runs: no restart is needed between them.

flags
{_OVERRIDES}
""",
    "vllm-stop": f"""\
usage: axolotl vllm-stop [CONFIG.yaml] [--port N]

Stops one server with its child processes: the one of the config, or the one on a port (8000 when neither is given)
that was started without vllm.sync_dir. It is found by the file server.json that it wrote, never by its name; other
servers on the machine are left alone. After 20 seconds what is left of it is killed. Exits 3 when there is no server.

flags
  --port N         the port of a server whose config names no vllm.sync_dir
{_OVERRIDES}
""",
    "check": f"""\
usage: axolotl check CONFIG.yaml [--OPTION VALUE ...]

Reads the config and prints every problem at once, each with its line. A valid config is summarised: the batch
arithmetic, the limit on prompts, the server's address. Exits 0 when `train` would take it, otherwise 2.

flags
{_OVERRIDES}
""",
    "verify-checkpoint": """\
usage: axolotl verify-checkpoint DIRECTORY

Reads a checkpoint, or every checkpoint of an output directory, and compares each file with the manifest that was
written with it. Exits 0 when all are what was saved, 9 when a file is missing, cut short or has other contents,
2 when there is no checkpoint.
""",
    "config-schema": """\
usage: axolotl config-schema [--markdown]

Prints the JSON schema of the config, for editors; with --markdown the reference tables of the documentation.
""",
}
