"""Reading a streamed answer: groups as they come, slow told from hung."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from axolotl.failpoints import point
from axolotl.serving.patience import Patience
from axolotl.serving.reply import Answers, bad_reply
from axolotl.serving.transport import Lost, refusal
from axolotl.serving.wire import (
    STREAM_LINE,
    Group,
    StreamEnd,
    StreamError,
    StreamGroup,
    StreamLine,
    StreamProgress,
    StreamStart,
)


def read_groups(lines: Iterator[bytes], answers: Answers, patience: Patience) -> Iterator[Group]:
    """The groups of one exchange, checked and counted into `answers`.

    Any line is contact. A group is progress, and so is a work counter that grew; there is no limit to how long slow
    progress may take. The time that the caller spends with a group does not count.

    Raises:
        Lost: the answer broke off, or the counter stood still for `patience.timeout_s` (`is_hung`).
        ServerError: `E-SRV-09` a line that does not fit; the server's own error.
    """
    is_started = is_ended = False
    patience.asked()
    for raw in lines:
        patience.heard()
        line = _parse(raw)
        if is_ended or is_started == isinstance(line, StreamStart):
            raise bad_reply(f"a line of type {line.type} where none belongs")
        match line:
            case StreamStart():
                answers.check_start(line, patience.instance_id or "")
                is_started = True
                if answers.request.score_ids is None:
                    point("gen.sent")
            case StreamGroup():
                group = answers.add(line.group)
                patience.finished()
                yield group
                patience.heard()
                patience.asked()
            case StreamProgress():
                patience.counted(patience.instance_id, line.work)
            case StreamError():
                raise refusal(line.status, line.error)
            case StreamEnd():
                answers.check_end()
                is_ended = True
    if not is_ended:
        raise Lost("cut its answer short")


def _parse(raw: bytes) -> StreamLine:
    try:
        return STREAM_LINE.validate_json(raw)
    except ValidationError as problem:
        raise bad_reply(f"a line of {len(raw)} bytes that is not of this protocol") from problem
