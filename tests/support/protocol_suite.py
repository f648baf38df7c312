"""What every server must do, whichever engine is behind it: inherit `ProtocolSuite` beside a fixture `subject`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from axolotl.errors import ServerError, SyncError
from axolotl.serving.client import ServerClient
from axolotl.serving.manifest import MANIFEST_NAME, write_manifest
from axolotl.serving.processes import own_namespace
from axolotl.serving.wire import (
    PROTOCOL_VERSION,
    STREAM_LINE,
    ErrorBody,
    Fingerprint,
    GenerateRequest,
    GenerateResponse,
    Health,
    Progress,
    Sampling,
    ServerInfo,
    SessionResponse,
    StreamEnd,
    StreamGroup,
    StreamLine,
    StreamStart,
)
from tests.support.live_server import LiveServer

ROUTES = [
    ("GET", "/health/"),
    ("GET", "/server_info/"),
    ("GET", "/progress/"),
    ("GET", "/metrics/"),
    ("POST", "/session/"),
    ("POST", "/generate/"),
    ("POST", "/set_lora_adapter/"),
    ("POST", "/clear_lora_adapter/"),
    ("POST", "/set_weights/"),
    ("POST", "/link_weights/"),
    ("POST", "/receive_weights/"),
]

# No TLS, so no certificates to read for every request.
HTTP = httpx.Client(transport=httpx.HTTPTransport(verify=False), timeout=60)

PROMPTS = [[5, 6, 7, 8], [9, 10], [11]]
SEEDS = [[1, 2], [3, 4], [5, 6]]


@dataclass(frozen=True)
class Subject:
    """A running server and what a test needs to talk to it.

    publish: `(run_id, version) -> digest`, writes a different, effective adapter for each version. publish_weights: the
    same for full weights.
    tolerance: how close sampled and scored log-probs are. endless: `Sampling.extra` under which no completion ends
    before `max_tokens`.
    """

    server: LiveServer
    fingerprint: Fingerprint
    max_model_len: int
    publish: Callable[[str, int], str]
    publish_weights: Callable[[str, int], str]
    tolerance: float = 1e-4
    endless: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})


def generate_request(**options: object) -> GenerateRequest:
    adapter_version = options.pop("adapter_version", 0)
    seeds = options.pop("seeds", SEEDS)
    sampling = Sampling(**{"n": 2, "max_tokens": 6, **options})
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        adapter_version=adapter_version,
        prompts=PROMPTS,
        sampling=sampling,
        seeds=seeds,
    )


def ids_of(response: GenerateResponse) -> list[list[list[int]]]:
    return [[completion.ids for completion in group.completions] for group in response.groups]


class ProtocolSuite:
    """Needs a fixture `subject` of class or module scope."""

    @pytest.fixture
    def client(self, subject: Subject) -> Iterator[ServerClient]:
        with subject.server.client() as client:
            client.wait_ready()
            yield client

    @pytest.fixture
    def run_id(self, client: ServerClient, subject: Subject) -> Iterator[str]:
        """A run that holds the server during the test."""
        run_id = f"run-{uuid.uuid4().hex[:8]}"
        client.claim(run_id, subject.fingerprint)
        yield run_id
        client.release()

    def raw(self, subject: Subject, method: str, path: str, **options: object) -> httpx.Response:
        headers = {**subject.server.headers, **options.pop("headers", {})}
        return HTTP.request(method, subject.server.url + path, headers=headers, **options)

    def streamed(self, subject: Subject, request: GenerateRequest) -> list[StreamLine]:
        reply = self.raw(subject, "POST", "/generate/", json={**request.model_dump(), "stream": True})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
        return [STREAM_LINE.validate_json(line) for line in reply.content.splitlines()]

    def progress(self, subject: Subject) -> Progress:
        return Progress.model_validate_json(self.raw(subject, "GET", "/progress/").content)

    def metrics(self, subject: Subject) -> dict[str, float]:
        """Those that have no labels, and the last one of each name that has."""
        text = self.raw(subject, "GET", "/metrics").text
        return {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }

    # Who is let in

    @pytest.mark.parametrize("path", ["/health", "/health/"])
    def test_health_is_open(self, subject: Subject, path: str) -> None:
        reply = HTTP.get(subject.server.url + path)
        assert reply.status_code == 200
        assert Health.model_validate_json(reply.content).status == "ok"

    @pytest.mark.parametrize(("method", "path"), ROUTES[1:])
    @pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic dGVzdA==", "Bearer \N{SNOWMAN}"])
    def test_every_other_route_needs_the_token(
        self, subject: Subject, method: str, path: str, authorization: str | None
    ) -> None:
        headers = {"authorization": authorization.encode()} if authorization else {}
        reply = HTTP.request(method, subject.server.url + path, headers=headers)
        assert reply.status_code == 401
        assert ErrorBody.model_validate_json(reply.content).code == "E-SRV-10"

    @pytest.mark.parametrize(("method", "path"), ROUTES[1:])
    def test_the_trailing_slash_is_optional(self, subject: Subject, method: str, path: str) -> None:
        with_slash = self.raw(subject, method, path, json={"no": "body"} if method == "POST" else None)
        without = self.raw(subject, method, path.rstrip("/"), json={"no": "body"} if method == "POST" else None)
        assert with_slash.status_code == without.status_code != 404

    @pytest.mark.parametrize(("method", "path", "status"), [("GET", "/docs", 404), ("GET", "/generate/", 405)])
    def test_other_routes_do_not_exist(self, subject: Subject, method: str, path: str, status: int) -> None:
        reply = self.raw(subject, method, path)
        assert reply.status_code == status
        ErrorBody.model_validate_json(reply.content)

    def test_web_pages_and_forms_are_refused(self, subject: Subject) -> None:
        assert self.raw(subject, "GET", "/server_info/", headers={"origin": "http://evil.example"}).status_code == 403
        form = self.raw(subject, "POST", "/generate/", content="{}", headers={"content-type": "text/plain"})
        assert form.status_code == 415

    # What it says of itself

    def test_server_info(self, subject: Subject, client: ServerClient) -> None:
        info = ServerInfo.model_validate_json(self.raw(subject, "GET", "/server_info/").content)
        assert (info.server, info.protocol) == ("axolotl", PROTOCOL_VERSION)
        assert info.fingerprint == subject.fingerprint
        assert info.max_model_len == subject.max_model_len
        assert info.max_versions == 3

    # Generation

    def test_groups_come_in_order_and_complete(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        response = client.generate(generate_request())
        assert [group.index for group in response.groups] == [0, 1, 2]
        assert (response.adapter_version, response.instance_id) == (0, client.info.instance_id)
        for group in response.groups:
            assert len(group.completions) == 2
            for completion in group.completions:
                assert 1 <= len(completion.ids) <= 6 and len(completion.ids) == len(completion.logprobs)
                assert (len(completion.ids) < 6) <= (completion.finish_reason == "stop")

    def test_seeds_decide_the_tokens(self, client: ServerClient, run_id: str) -> None:
        first = ids_of(client.generate(generate_request()))
        assert ids_of(client.generate(generate_request())) == first
        assert ids_of(client.generate(generate_request(seeds=[[11, 12], [13, 14], [15, 16]]))) != first

    def test_a_request_without_seeds_is_served(self, client: ServerClient, run_id: str) -> None:
        assert len(client.generate(generate_request(seeds=None)).groups) == 3

    def test_scores_are_the_sampled_log_probs(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        response = client.generate(generate_request())
        tokens = [group.completions[0].ids for group in response.groups]
        scores = client.score(PROMPTS, tokens, 1.0, 0)
        for scored, group in zip(scores, response.groups, strict=True):
            assert scored == pytest.approx(group.completions[0].logprobs, abs=subject.tolerance, nan_ok=True)

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"prompts": []}, "prompts"),
            ({"prompts": [[5], []], "seeds": None}, "prompts[1]: empty"),
            ({"prompts": [[5], [6, 10**9]], "seeds": None}, "prompts[1][1]"),
            ({"prompts": [[5], [-1]], "seeds": None}, "prompts[1][0]"),
            ({"prompts": [[5]] * 1025, "seeds": None}, "prompts: 1025"),
            ({"prompts": [["x"]], "seeds": None}, "prompts[0][0]"),
            ({"prompts": [[5] * 100_000], "seeds": None}, "prompts[0]: 100000"),
            ({"seeds": [[1, 2]]}, "seeds: 1 lists for 3"),
            ({"seeds": [[1, 2], [3], [4, 5]]}, "seeds[1]"),
            ({"seeds": [[1, 2], [3, -4], [4, 5]]}, "seeds[1][1]"),
            ({"seeds": [[1, 2], [3, 2**63], [4, 5]]}, "seeds[1][1]"),
            ({"sampling": {"n": 2, "max_tokens": 0}}, "sampling.max_tokens"),
            ({"sampling": {"n": 2, "max_tokens": 10**7}}, "max_tokens"),
            ({"sampling": {"n": 257, "max_tokens": 1}, "seeds": None}, "sampling.n: 257"),
            ({"sampling": {"n": 2, "max_tokens": 1, "temperature": -1}}, "sampling.temperature"),
            ({"sampling": {"n": 2, "max_tokens": 1, "top_q": 1}}, "sampling.top_q"),
            ({"sampling": {"n": 2, "max_tokens": 1, "extra": {"no_such_option": 1}}}, "no_such_option"),
            ({"score_ids": [[1]]}, "score_ids: 1 lists for 3"),
            ({"score_ids": [[1], [10**9], [2]]}, "score_ids[1][0]"),
            ({"path": "/etc/passwd"}, "path"),
        ],
    )
    def test_bad_requests_name_the_value_and_leave_the_engine_alive(
        self, subject: Subject, client: ServerClient, run_id: str, changes: dict[str, object], named: str
    ) -> None:
        body = {**generate_request().model_dump(), **changes}
        reply = self.raw(subject, "POST", "/generate/", json=body)
        assert reply.status_code == 422
        assert named in ErrorBody.model_validate_json(reply.content).what
        assert len(client.generate(generate_request()).groups) == 3

    @pytest.mark.parametrize(
        ("changes", "option"),
        [
            ({"prompts": [[5]] * 1025, "seeds": None}, "gradient_accumulation_steps"),
            ({"sampling": {"n": 257, "max_tokens": 1}, "seeds": None}, "trl.num_generations"),
        ],
    )
    def test_requests_that_ask_too_much_say_what_to_lower(
        self, subject: Subject, changes: dict[str, object], option: str
    ) -> None:
        reply = self.raw(subject, "POST", "/generate/", json={**generate_request().model_dump(), **changes})
        assert option in ErrorBody.model_validate_json(reply.content).do

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompts": NaN}', b"\xff\xfe"])
    def test_bodies_that_are_no_request_are_refused(self, subject: Subject, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        reply = self.raw(subject, "POST", "/generate/", content=body, headers=headers)
        assert 400 <= reply.status_code < 500
        ErrorBody.model_validate_json(reply.content)

    # Streaming

    def test_a_streamed_answer_is_the_whole_answer_in_any_order(
        self, subject: Subject, client: ServerClient, run_id: str
    ) -> None:
        request = generate_request()
        whole = client.generate(request)
        lines = self.streamed(subject, request)
        start, end = lines[0], lines[-1]
        assert isinstance(start, StreamStart) and isinstance(end, StreamEnd)
        assert (start.request_id, start.adapter_version) == (request.request_id, 0)
        assert start.instance_id == client.info.instance_id
        groups = [line.group for line in lines if isinstance(line, StreamGroup)]
        assert len(groups) == len(PROMPTS)
        groups.sort(key=lambda group: group.index)
        assert [group.index for group in groups] == [0, 1, 2]
        assert [[item.ids for item in group.completions] for group in groups] == ids_of(whole)
        for streamed, plain in zip(groups, whole.groups, strict=True):
            for mine, theirs in zip(streamed.completions, plain.completions, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=subject.tolerance, nan_ok=True)

    def test_scores_can_be_streamed(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        tokens = [[20, 21], [22], [23, 24, 25]]
        request = generate_request().model_copy(update={"score_ids": tokens, "seeds": None})
        groups = [line.group for line in self.streamed(subject, request) if isinstance(line, StreamGroup)]
        values = [group.completions[0].logprobs for group in sorted(groups, key=lambda group: group.index)]
        assert values == [
            pytest.approx(row, abs=subject.tolerance, nan_ok=True) for row in client.score(PROMPTS, tokens, 1.0, 0)
        ]

    def test_a_bad_request_to_stream_is_refused_as_any_other(self, subject: Subject) -> None:
        body = {**generate_request(adapter_version=9).model_dump(), "stream": True}
        reply = self.raw(subject, "POST", "/generate/", json=body)
        assert (reply.status_code, ErrorBody.model_validate_json(reply.content).code) == (409, "E-SRV-13")

    def test_a_client_that_leaves_frees_what_it_asked_for(
        self, subject: Subject, client: ServerClient, run_id: str
    ) -> None:
        """Long completions; after the first line the connection is closed."""
        long = subject.max_model_len - 8
        request = generate_request(max_tokens=long, extra=subject.endless)
        body = {**request.model_dump(), "stream": True}
        with HTTP.stream("POST", subject.server.url + "/generate/", json=body, headers=subject.server.headers) as reply:
            assert isinstance(STREAM_LINE.validate_json(next(reply.iter_lines())), StreamStart)
        deadline = time.monotonic() + 60
        while self.progress(subject).running and time.monotonic() < deadline:
            pass
        assert self.progress(subject).running == 0
        assert len(client.generate(generate_request()).groups) == 3

    # Progress and metrics

    def test_progress_grows_with_the_tokens_and_never_falls(
        self, subject: Subject, client: ServerClient, run_id: str
    ) -> None:
        seen = [self.progress(subject)]
        for _ in range(2):
            response = client.generate(generate_request())
            num_tokens = sum(len(item.ids) for group in response.groups for item in group.completions)
            seen.append(self.progress(subject))
            assert seen[-1].generated - seen[-2].generated >= num_tokens
            assert seen[-1].work - seen[-2].work >= num_tokens
        client.claim(run_id, subject.fingerprint)
        seen.append(self.progress(subject))
        for earlier, later in itertools.pairwise(seen):
            assert later.work >= earlier.work and later.generated >= earlier.generated
        assert (seen[-1].running, seen[-1].adapter_version) == (0, 0)
        assert seen[-1].instance_id == client.info.instance_id

    def test_metrics_can_be_read_by_prometheus(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        client.set_adapter(1, subject.publish(run_id, 1))
        before = self.metrics(subject)
        client.generate(generate_request(adapter_version=1))
        after = self.metrics(subject)
        assert (after["axolotl_up"], after["axolotl_policy_version"], after["axolotl_session_held"]) == (1, 1, 1)
        assert after["axolotl_tokens_generated_total"] > before["axolotl_tokens_generated_total"]
        assert after["axolotl_requests_running"] == 0
        if client.info.engine == "vllm":
            assert any(name.startswith("vllm:") for name in after), "vLLM's own numbers"

    # Adapters

    def test_adapters_come_and_go(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        for version in (1, 2, 3):
            digest = subject.publish(run_id, version)
            answer = client.set_adapter(version, digest)
            assert (answer.adapter_version, answer.manifest_sha256) == (version, digest)
            assert answer.num_modules > 0
        assert answer.loaded_versions == [2, 3], "current and previous are kept"
        assert client.generate(generate_request(adapter_version=2)).adapter_version == 2
        with pytest.raises(ServerError, match="version 1 is not held"):
            client.generate(generate_request(adapter_version=1))
        cleared = client.clear_adapter()
        assert (cleared.adapter_version, cleared.loaded_versions) == (0, [])

    def test_an_adapter_changes_what_is_computed(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        tokens = [[20, 21], [22], [23, 24, 25]]
        base = client.score(PROMPTS, tokens, 1.0, 0)
        client.set_adapter(1, subject.publish(run_id, 1))
        client.set_adapter(2, subject.publish(run_id, 2))
        first, second = (client.score(PROMPTS, tokens, 1.0, version) for version in (1, 2))
        for row in range(3):
            assert abs(first[row][0] - base[row][0]) > 1e-3
            assert abs(first[row][0] - second[row][0]) > 1e-3
        response = client.generate(generate_request(adapter_version=1))
        sampled = [group.completions[0] for group in response.groups]
        scores = client.score(PROMPTS, [completion.ids for completion in sampled], 1.0, 1)
        for scored, completion in zip(scores, sampled, strict=True):
            assert scored == pytest.approx(completion.logprobs, abs=subject.tolerance, nan_ok=True)
        assert client.score(PROMPTS, tokens, 1.0, 0) == [pytest.approx(row, abs=subject.tolerance) for row in base]

    def test_a_reused_server_computes_what_it_did_for_its_first_run(
        self, subject: Subject, client: ServerClient
    ) -> None:
        """The run in between has versions of the same numbers with other contents: a cache that is keyed by number, or
        an adapter that stayed, would show."""
        first = self.one_run(subject, client, (1, 2))
        between = self.one_run(subject, client, (5, 6))
        again = self.one_run(subject, client, (1, 2))
        for version in (0, 1, 2):
            assert ids_of(again[version][0]) == ids_of(first[version][0])
            for now, then in zip(again[version][1], first[version][1], strict=True):
                assert now == pytest.approx(then, abs=1e-3, nan_ok=True)
        assert between[0][1] == [pytest.approx(row, abs=1e-3, nan_ok=True) for row in first[0][1]]

    def one_run(
        self, subject: Subject, client: ServerClient, contents: tuple[int, int]
    ) -> dict[int, tuple[GenerateResponse, list[list[float]]]]:
        """Claim, push versions 1 and 2 with the contents that `publish` gives `contents`, ask each, release."""
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        client.claim(run_id, subject.fingerprint)
        answers = {}
        for version in (0, 1, 2):
            if version:
                client.set_adapter(version, self.publish_as(subject, run_id, version, contents[version - 1]))
            response = client.generate(generate_request(adapter_version=version))
            answers[version] = (response, client.score(PROMPTS, [[20, 21], [22], [23, 24, 25]], 1.0, version))
        client.release()
        return answers

    def publish_as(self, subject: Subject, run_id: str, version: int, contents: int) -> str:
        """Version `version` with what `publish` writes for version `contents`."""
        digest = subject.publish(run_id, contents)
        if contents == version:
            return digest
        directory = subject.server.sync_dir / "adapters" / run_id
        rank = json.loads((directory / f"v{contents}" / MANIFEST_NAME).read_bytes())["rank"]
        (directory / f"v{contents}" / MANIFEST_NAME).unlink()
        (directory / f"v{contents}").rename(directory / f"v{version}")
        return write_manifest(directory / f"v{version}", version=version, rank=rank)

    def test_setting_the_same_version_again_confirms_it(
        self, subject: Subject, client: ServerClient, run_id: str
    ) -> None:
        digest = subject.publish(run_id, 1)
        assert client.set_adapter(1, digest) == client.set_adapter(1, digest)

    def test_a_refused_adapter_leaves_the_previous_one(
        self, subject: Subject, client: ServerClient, run_id: str
    ) -> None:
        client.set_adapter(1, subject.publish(run_id, 1))
        subject.publish(run_id, 2)
        directory = subject.server.sync_dir / "adapters" / run_id
        with pytest.raises(SyncError) as wrong_digest:
            client.set_adapter(2, "0" * 64)
        with pytest.raises(SyncError) as missing:
            client.set_adapter(7, "0" * 64)
        digest = subject.publish(run_id, 3)
        with (directory / "v3" / "adapter_model.safetensors").open("ab") as file:
            file.write(b"more")
        with pytest.raises(SyncError) as changed:
            client.set_adapter(3, digest)
        codes = [problem.value.code for problem in (wrong_digest, missing, changed)]
        assert codes == ["E-SYN-02", "E-SYN-06", "E-SYN-02"]
        assert str(directory) not in "".join(str(problem.value.report()) for problem in (wrong_digest, missing))
        assert client.generate(generate_request(adapter_version=1)).adapter_version == 1

    # Full weights

    def test_full_weights_are_the_only_version(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        tokens = [[20, 21], [22], [23, 24, 25]]
        base = client.score(PROMPTS, tokens, 1.0, 0)
        client.set_adapter(1, subject.publish(run_id, 1))
        seen = [base, client.score(PROMPTS, tokens, 1.0, 1)]
        for version in (2, 3):
            digest = subject.publish_weights(run_id, version)
            answer = client.set_weights(version, digest)
            assert (answer.adapter_version, answer.manifest_sha256) == (version, digest)
            assert answer.num_modules > 0 and answer.loaded_versions == [version]
            assert client.set_weights(version, digest) == answer, "the same again is confirmed"
            seen.append(client.score(PROMPTS, tokens, 1.0, version))
            response = client.generate(generate_request(adapter_version=version))
            sampled = [group.completions[0] for group in response.groups]
            scores = client.score(PROMPTS, [completion.ids for completion in sampled], 1.0, version)
            for scored, completion in zip(scores, sampled, strict=True):
                assert scored == pytest.approx(completion.logprobs, abs=subject.tolerance, nan_ok=True)
            for earlier in range(version):
                with pytest.raises(ServerError, match=f"version {earlier} is not held"):
                    client.generate(generate_request(adapter_version=earlier))
        for first, second in itertools.combinations(seen, 2):
            assert all(abs(first[row][0] - second[row][0]) > 1e-3 for row in range(3))
        assert client.clear_adapter().loaded_versions == []
        assert client.score(PROMPTS, tokens, 1.0, 0) == [pytest.approx(row, abs=subject.tolerance) for row in base]

    def test_refused_weights_leave_what_was_served(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        client.set_weights(1, subject.publish_weights(run_id, 1))
        digest = subject.publish_weights(run_id, 2)
        with next((subject.server.sync_dir / "weights" / run_id / "v2").glob("*.safetensors")).open("ab") as file:
            file.write(b"more")
        reply = self.push_weights(subject, run_id, 2, digest)
        assert (reply.status_code, ErrorBody.model_validate_json(reply.content).code) == (409, "E-SYN-02")
        stranger = self.push_weights(subject, "somebody", 1, digest)
        assert (stranger.status_code, ErrorBody.model_validate_json(stranger.content).code) == (409, "E-SRV-06")
        assert client.generate(generate_request(adapter_version=1)).adapter_version == 1

    def push_weights(self, subject: Subject, run_id: str, version: int, digest: str) -> httpx.Response:
        body = {"run_id": run_id, "version": version, "manifest_sha256": digest}
        return self.raw(subject, "POST", "/set_weights/", json=body)

    @pytest.mark.parametrize("run_id", ["..", "../x", "/etc", "~", "a/b", "%2e%2e", "a\0b", "A", "", "a" * 65, "．．"])
    def test_runs_are_named_by_plain_ids(self, subject: Subject, run_id: str) -> None:
        body = {"run_id": run_id, "version": 1, "manifest_sha256": "0" * 64}
        for route in ("/set_lora_adapter/", "/set_weights/"):
            reply = self.raw(subject, "POST", route, json=body)
            assert reply.status_code == 422
            assert "run_id" in ErrorBody.model_validate_json(reply.content).what

    # Sessions

    def test_a_run_that_holds_nothing_can_set_nothing(self, subject: Subject, client: ServerClient) -> None:
        body = {"run_id": "nobody", "version": 1, "manifest_sha256": "0" * 64}
        reply = self.raw(subject, "POST", "/set_lora_adapter/", json=body)
        assert (reply.status_code, ErrorBody.model_validate_json(reply.content).code) == (409, "E-SRV-06")

    def test_a_claim_resets_what_the_last_run_left(self, subject: Subject, client: ServerClient) -> None:
        client.claim("first-run", subject.fingerprint)
        client.set_adapter(1, subject.publish("first-run", 1))
        assert client.claim("second-run", subject.fingerprint).adapter_version == 0
        info = ServerInfo.model_validate_json(self.raw(subject, "GET", "/server_info/").content)
        assert (info.run_id, info.adapter_version, info.loaded_versions) == ("second-run", 0, [])
        client.release()
        assert ServerInfo.model_validate_json(self.raw(subject, "GET", "/server_info/").content).run_id is None

    def test_a_run_that_lost_the_server_is_not_answered(self, subject: Subject, client: ServerClient) -> None:
        """The next run's adapter has the same number, but it is another policy."""
        first, second = (f"run-{uuid.uuid4().hex[:12]}" for _ in range(2))
        client.claim(first, subject.fingerprint)
        client.set_adapter(1, subject.publish(first, 1))
        with subject.server.client() as other:
            other.wait_ready()
            other.claim(second, subject.fingerprint)
            other.set_adapter(1, subject.publish(second, 1))
            with pytest.raises(ServerError, match=f"run {first} does not hold this server") as problem:
                client.generate(generate_request(adapter_version=1))
            assert problem.value.code == "E-SRV-06"
            with pytest.raises(ServerError, match="does not hold"):
                client.score(PROMPTS, [[1], [2], [3]], 1.0, 1)
            question = generate_request(adapter_version=1).model_dump()
            assert self.raw(subject, "POST", "/generate/", json=question).status_code == 200
            assert other.generate(generate_request(adapter_version=1)).adapter_version == 1
            other.release()

    def test_a_lease_is_renewed_by_its_holder_only(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        body = self.claim_of(subject, run_id)
        reply = self.raw(subject, "POST", "/session/", json={**body, "action": "renew"})
        answer = SessionResponse.model_validate_json(reply.content)
        assert (reply.status_code, answer.run_id, answer.lease_s) == (200, run_id, 60.0)
        client.set_adapter(1, subject.publish(run_id, 1))
        self.raw(subject, "POST", "/session/", json={**body, "action": "renew"})
        assert client.generate(generate_request(adapter_version=1)).adapter_version == 1, "nothing was reset"
        other = self.raw(subject, "POST", "/session/", json={**body, "run_id": "other", "action": "renew"})
        assert (other.status_code, ErrorBody.model_validate_json(other.content).code) == (409, "E-SRV-06")

    def test_a_released_server_is_nobodys(self, subject: Subject, client: ServerClient, run_id: str) -> None:
        body = self.claim_of(subject, run_id)
        other = self.raw(subject, "POST", "/session/", json={**body, "run_id": "other", "action": "release"})
        assert SessionResponse.model_validate_json(other.content).run_id == run_id, "not theirs to give back"
        mine = self.raw(subject, "POST", "/session/", json={**body, "action": "release"})
        assert SessionResponse.model_validate_json(mine.content).run_id is None
        again = self.raw(subject, "POST", "/session/", json={**body, "action": "renew"})
        assert again.status_code == 409

    def test_sampling_the_engine_does_not_support_is_refused_with_the_claim(self, subject: Subject) -> None:
        sampling = Sampling(max_tokens=4, extra={"no_such_option": 1}).model_dump()
        reply = self.raw(subject, "POST", "/session/", json={**self.claim_of(subject, "picky"), "sampling": sampling})
        body = ErrorBody.model_validate_json(reply.content)
        assert (reply.status_code, body.code) == (422, "E-SRV-19") and "no_such_option" in body.what
        assert ServerInfo.model_validate_json(self.raw(subject, "GET", "/server_info/").content).run_id is None

    def claim_of(self, subject: Subject, run_id: str) -> dict[str, object]:
        return {
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": own_namespace(),
            "fingerprint": subject.fingerprint.model_dump(),
        }

    @pytest.mark.parametrize("part", ["config", "tokenizer", "weights"])
    def test_another_model_is_refused_with_the_part_that_differs(
        self, subject: Subject, client: ServerClient, part: str
    ) -> None:
        other = subject.fingerprint.model_copy(update={part: "f" * 64, "base_model": "other"})
        with pytest.raises(ServerError, match="the config trains other") as problem:
            client.claim("other-model", other)
        assert problem.value.code == "E-SRV-07" and part in problem.value.why
        assert f"{part} {getattr(subject.fingerprint, part)[:12]}" in problem.value.why, "what the server has"
        assert f"{part} {'f' * 12}" in problem.value.why, "what the trainer has"

    def test_a_live_run_keeps_the_server_and_a_dead_one_loses_it(self, subject: Subject, client: ServerClient) -> None:
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            body = {
                "run_id": "holder",
                "host": socket.gethostname(),
                "pid": holder.pid,
                "namespace": own_namespace(),
                "fingerprint": subject.fingerprint.model_dump(),
            }
            assert self.raw(subject, "POST", "/session/", json=body).status_code == 200
            with pytest.raises(ServerError, match="in use by run holder") as problem:
                client.claim("second", subject.fingerprint)
            assert problem.value.code == "E-SRV-06"
            assert f"pid {holder.pid}" in problem.value.why and socket.gethostname() in problem.value.why
        finally:
            holder.kill()
            holder.wait()
            assert holder.stdin is not None
            holder.stdin.close()
        assert client.claim("second", subject.fingerprint).run_id == "second"
        client.release()
