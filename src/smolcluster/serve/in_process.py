"""A model in this process, without stages or a server: the simplest `Engine`.

    prompt ── all layers ──> logits ── sample ──> token ── all layers ──> logits ...

Its tokens are the same as with any number of machines.
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
from smolcluster.serve.engine.sampling import TokenSampler
from smolcluster.serve.engine.stage_model import Row, StageModel
from smolcluster.serve.engine.types import RetriesExhausted, SequenceRequest, Token
from smolcluster.serve.http.request_parsing import read_completion
from smolcluster.serve.http.service import BadRequest, Service

CHUNK = 512  # prompt tokens in one step


class InProcessEngine:
    """An `Engine` with all layers in this process."""

    def __init__(self, source: ModelSource, *, device: torch.device, dtype: torch.dtype) -> None:
        config, layers = source.config, range(source.config.num_layers)
        weights = source.load(layers, first=True, last=True, dtype=dtype, device=device)
        self._model = StageModel(config, layers, first=True, last=True, weights=weights, device=device, dtype=dtype)
        self._name = source.name
        self._numbers = itertools.count()

    @property
    def model_context(self) -> int:
        return self._model.config.max_seq_len

    context = model_context

    async def stream(self, request: SequenceRequest) -> AsyncGenerator[Token, None]:
        number, sampler, tokens = (
            next(self._numbers),
            TokenSampler(request.sampling, prompt=request.tokens),
            list(request.tokens),
        )
        cached = 0
        try:
            for left in reversed(range(request.max_tokens)):
                while cached < len(tokens):
                    new = tokens[cached : cached + CHUNK]
                    last = cached + len(new) == len(tokens)  # the head is expensive: for the last chunk only
                    row = Row(sequence=number, start=cached, count=len(new), logits=last)
                    logits_1V = self._model.run([row], torch.tensor(new))
                    cached += len(new)
                try:
                    token = sampler.choose(logits_1V[0])
                except ValueError as error:  # logits that are not finite
                    raise RetriesExhausted(str(error)) from error
                if token.token in request.stop_tokens:
                    yield Token(token=-1, finish="stop")
                    return
                sampler.accept(token.token)
                tokens.append(token.token)
                yield dataclasses.replace(token, finish="length") if left == 0 else token
        finally:
            self._model.forget(number)

    def state(self) -> dict[str, Any]:
        layers = self._model.config.num_layers
        here = {"name": "here", "device": str(self._model.device), "state": "ready"}
        stages = [{"layers": [0, layers - 1], "machines": [here]}]
        return {"ready": True, "model": self._name, "layers": layers, "stages": stages, "spares": [], "lost": []}


class InProcessClient:
    """A `CompletionClient` without a server."""

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
                (choice,) = runner.run(self._service.complete(job))
                yield AnswerChunk(text=choice.text, finish=choice.finish, tokens=job.usage.completion_tokens)
                return
            chunks = self._service.stream(job)
            try:
                while (chunk := runner.run(_next(chunks))) is not None:
                    yield AnswerChunk(text=chunk.text, finish=chunk.finish, tokens=job.usage.completion_tokens)
            finally:
                runner.run(chunks.aclose())


async def _next(chunks: AsyncGenerator[Any, None]) -> Any:
    return await anext(chunks, None)
