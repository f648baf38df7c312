"""What is still missing of a request to generate, and whether what comes belongs to it."""

from __future__ import annotations

from axolotl.errors import ServerError
from axolotl.serving.wire import Completion, GenerateRequest, Group, StreamStart


class Answers:
    """The groups of one request, over as many exchanges as it takes: each prompt is answered exactly once.

    vocab_size: None when the server does not say. adapter_version: as the server says it.
    """

    def __init__(self, request: GenerateRequest, vocab_size: int | None) -> None:
        self.request = request
        self.adapter_version: int | None = None
        self._instance_id: str | None = None
        self._vocab_size = vocab_size
        self._groups: dict[int, Group] = {}
        self._asked: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._groups) == len(self.request.prompts)

    @property
    def groups(self) -> list[Group]:
        """In the order of the prompts."""
        return [self._groups[index] for index in sorted(self._groups)]

    def missing(self) -> GenerateRequest:
        """The same request for the prompts without an answer: their seeds are theirs, whatever else is asked for."""
        request = self.request
        self._asked = [index for index in range(len(request.prompts)) if index not in self._groups]
        return request.model_copy(
            update={
                "prompts": [request.prompts[index] for index in self._asked],
                "seeds": request.seeds and [request.seeds[index] for index in self._asked],
                "score_ids": request.score_ids and [request.score_ids[index] for index in self._asked],
            }
        )

    def check_start(self, start: StreamStart, instance_id: str) -> None:
        """Raise `E-SRV-09` unless the answer is one to this request, from this process."""
        expected = {
            "request_id": (start.request_id, self.request.request_id),
            "instance_id": (start.instance_id, instance_id),
            "adapter_version": (start.adapter_version, self.request.adapter_version),
        }
        for name, (got, wanted) in expected.items():
            if got != wanted:
                raise bad_reply(f"{name} is {got!r}, asked was {wanted!r}")
        self.adapter_version, self._instance_id = start.adapter_version, start.instance_id

    def add(self, group: Group) -> Group:
        """Take a group of the newest `missing()`; returned with the number of its prompt in the whole request, and with
        the process that made it.

        Raises:
            ServerError: `E-SRV-09` it does not fit.
        """
        if not 0 <= group.index < len(self._asked):
            raise bad_reply(f"group {group.index} was not asked for")
        index = self._asked[group.index]
        if index in self._groups:
            raise bad_reply(f"group {group.index} came twice")
        self._check(index, group.completions)
        self._groups[index] = group.model_copy(update={"index": index, "instance_id": self._instance_id})
        return self._groups[index]

    def check_end(self) -> None:
        if not self.is_complete:
            raise bad_reply(f"{len(self.request.prompts) - len(self._groups)} groups are missing")

    def _check(self, index: int, completions: list[Completion]) -> None:
        request = self.request
        num_completions = 1 if request.score_ids is not None else request.sampling.n
        if len(completions) != num_completions:
            raise bad_reply(f"group {index} has {len(completions)} completions, not {num_completions}")
        for position, completion in enumerate(completions):
            name, ids = f"completion {position} of group {index}", completion.ids
            if len(ids) != len(completion.logprobs):
                raise bad_reply(f"{name} has {len(ids)} tokens and {len(completion.logprobs)} log-probs")
            if completion.log_kept is not None and len(ids) != len(completion.log_kept):
                raise bad_reply(f"{name} has {len(ids)} tokens and {len(completion.log_kept)} kept masses")
            if request.score_ids is not None and ids != request.score_ids[index]:
                raise bad_reply(f"{name} scores other tokens than asked")
            if request.score_ids is None and not 1 <= len(ids) <= request.sampling.max_tokens:
                raise bad_reply(f"{name} has {len(ids)} tokens, max_tokens is {request.sampling.max_tokens}")
            if self._vocab_size is not None and not all(0 <= token < self._vocab_size for token in ids):
                raise bad_reply(f"{name} has a token outside the vocabulary of {self._vocab_size}")


def bad_reply(why: str) -> ServerError:
    return ServerError("the server's answer does not fit the request", code="E-SRV-09", why=why, do="please report")
