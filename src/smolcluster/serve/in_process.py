"""A model in this process, without machines or a server: the shortest `Engine` there is, and the way to read one.

    prompt ── all layers ──> logits ── choose ──> token ── all layers ──> logits ...

Its tokens are those that any number of machines would give.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch

from smolcluster.errors import UserError
from smolcluster.serve.client.http import AnswerChunk, RequestOptions
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.sampling import Sampler
from smolcluster.serve.engine.stage_model import Row, StageModel
from smolcluster.serve.engine.types import RetriesExhausted, SequenceRequest, Token
from smolcluster.serve.http.api_types import read_completion
from smolcluster.serve.http.service import BadRequest, Service

CHUNK = 512  # tokens of a prompt at once


class InProcessEngine:
    """An `Engine`: every layer is here."""

    def __init__(self, source: ModelSource, *, device: torch.device, dtype: torch.dtype) -> None:
        config, layers = source.config, range(source.config.num_layers)
        weights = source.load(layers, first=True, last=True, dtype=dtype, device=device)
        self._part = StageModel(config, layers, first=True, last=True, weights=weights, device=device, dtype=dtype)
        self._name = source.name
        self._numbers = itertools.count()

    @property
    def model_context(self) -> int:
        return self._part.config.max_seq_len

    context = model_context

    async def stream(self, ask: SequenceRequest) -> AsyncGenerator[Token, None]:
        number, chooser, tokens = next(self._numbers), Sampler(ask.sampling, prompt=ask.tokens), list(ask.tokens)
        held = 0
        try:
            for left in reversed(range(ask.max_tokens)):
                while held < len(tokens):
                    new = tokens[held : held + CHUNK]
                    answer = held + len(new) == len(tokens)  # the head is wide: it runs for the last chunk alone
                    row = Row(sequence=number, start=held, count=len(new), answer=answer)
                    logits_1V = self._part.run([row], torch.tensor(new))
                    held += len(new)
                try:
                    token = chooser.choose(logits_1V[0])
                except ValueError as error:  # logits that are no numbers
                    raise RetriesExhausted(str(error)) from error
                if token.token in ask.stop_tokens:
                    yield Token(token=-1, finish="stop")
                    return
                chooser.accept(token.token)
                tokens.append(token.token)
                yield dataclasses.replace(token, finish="length") if left == 0 else token
        finally:
            self._part.forget(number)

    def state(self) -> dict[str, Any]:
        layers = self._part.config.num_layers
        here = {"name": "here", "device": str(self._part.device), "state": "ready"}
        stages = [{"layers": [0, layers - 1], "machines": [here]}]
        return {"ready": True, "model": self._name, "layers": layers, "stages": stages, "spares": [], "lost": []}


class InProcessClient:
    """What `Client` is for a server."""

    def __init__(self, service: Service) -> None:
        self._service, self.name = service, service.model_name

    def complete(
        self, prompt: str, *, options: RequestOptions, stream: bool = True
    ) -> Generator[AnswerChunk, None, None]:
        with asyncio.Runner() as runner:
            try:
                job = runner.run(self._service.prepare(read_completion({"prompt": prompt, **options}).request))
            except BadRequest as error:
                raise UserError(str(error)) from error
            if not stream:
                (whole,) = runner.run(self._service.whole(job))
                yield AnswerChunk(text=whole.text, finish=whole.finish, tokens=job.usage.completion_tokens)
                return
            pieces = self._service.stream(job)
            try:
                while (piece := runner.run(_next(pieces))) is not None:
                    yield AnswerChunk(text=piece.text, finish=piece.finish, tokens=job.usage.completion_tokens)
            finally:
                runner.run(pieces.aclose())


async def _next(pieces: AsyncGenerator[Any, None]) -> Any:
    return await anext(pieces, None)
