"""A thin OpenAI completions front on OpenVINO GenAI's continuous batching: FOLDER PORT SLOTS THREADS.

The package brings no server. One thread steps the pipeline; each request has a queue that its HTTP answer drains.
Runs in the peer's environment.
"""

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from itertools import count

import openvino_genai as genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

folder, port, slots, threads = sys.argv[1], *map(int, sys.argv[2:])
scheduling = genai.SchedulerConfig()
scheduling.cache_size = 2  # GiB
scheduling.max_num_seqs = slots
scheduling.max_num_batched_tokens = 512
scheduling.dynamic_split_fuse = True
pipeline = genai.ContinuousBatchingPipeline(
    folder, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
)
tokenizer = pipeline.get_tokenizer()
numbers = count()

Deliver = Callable[[list[int] | None], None]
arrived: queue.SimpleQueue[tuple[str, genai.GenerationConfig, Deliver]] = queue.SimpleQueue()


def turn() -> None:
    """Step while anything runs, sleep while nothing does."""
    running: list[tuple[genai.GenerationHandle, Deliver]] = []
    while True:
        while not running or not arrived.empty():
            prompt, config, deliver = arrived.get()
            running.append((pipeline.add_request(next(numbers), prompt, config), deliver))
        pipeline.step()
        going = []
        for handle, deliver in running:
            if handle.can_read():
                deliver([token for output in handle.read().values() for token in output.generated_ids])
            if handle.get_status() == genai.GenerationStatus.RUNNING:
                going.append((handle, deliver))
            else:
                deliver(None)
        running = going


async def tokens(prompt: str, max_tokens: int) -> AsyncIterator[list[int]]:
    config = genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, ignore_eos=True)
    loop, mine = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()
    arrived.put((prompt, config, lambda got: loop.call_soon_threadsafe(mine.put_nowait, got)))
    while (got := await mine.get()) is not None:
        yield got


def event(text: str, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if usage else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"object": "text_completion", "choices": choices, "usage": usage}).encode() + b"\n\n"


async def stream(prompt: str, max_tokens: int, num_prompt: int) -> AsyncIterator[bytes]:
    all_tokens: list[int] = []
    async for got in tokens(prompt, max_tokens):
        recent = all_tokens[-8:]  # enough for a character of several tokens
        all_tokens += got
        yield event(tokenizer.decode(recent + got).removeprefix(tokenizer.decode(recent) if recent else ""))
    yield event("", {"prompt_tokens": num_prompt, "completion_tokens": len(all_tokens)})
    yield b"data: [DONE]\n\n"


app = FastAPI()


@app.get("/v1/models")
def models() -> dict[str, object]:
    return {"object": "list", "data": [{"id": "smollm2", "object": "model"}]}


@app.post("/v1/completions")
async def completions(request: Request) -> Response:
    body = await request.json()
    prompt, max_tokens = body["prompt"], body["max_tokens"]
    num_prompt = tokenizer.encode(prompt).input_ids.shape[1]
    if body.get("stream"):
        return StreamingResponse(stream(prompt, max_tokens, num_prompt), media_type="text/event-stream")
    got = [token async for some in tokens(prompt, max_tokens) for token in some]
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(got)}
    return JSONResponse({"choices": [{"index": 0, "text": tokenizer.decode(got)}], "usage": usage})


threading.Thread(target=turn, daemon=True).start()
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
