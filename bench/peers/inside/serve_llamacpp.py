"""llama.cpp's own HTTP server, in this process: MODEL.gguf PORT SLOTS THREADS. Runs in the peer's environment."""

import signal
import sys

import xllamacpp

TOKENS = 1024  # of one slot: the longest request has 640

model, port, slots, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {"smollm2"}
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = slots * TOKENS
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cache_ram_mib = 0  # keeping prompts that never come again costs it time
server = xllamacpp.Server(params)
print(server.listening_address, xllamacpp.get_system_info(), flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
sys.exit(0)
