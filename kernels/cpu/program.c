/* Runs phases of work over threads that are started once.
 *
 * A phase ends when its pieces are done, not when all threads have come by: a thread that the system has put aside
 * between two pieces holds nobody up, and finds its way back when it is let on. Who has nothing to do looks for a
 * moment whether the rest is done, then sleeps: a waiting thread that spins for long takes the core from the very
 * thread that it waits for, as soon as another process wants one. */
#include "noria_cpu.h"

#include <limits.h>
#include <omp.h>
#include <string.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
static void sleep_while(int32_t *word, int32_t value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL); }
static void wake(int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX); }
#else
#include <sched.h>
static void sleep_while(int32_t *word, int32_t value) { (void)word, (void)value, sched_yield(); }
static void wake(int32_t *word) { (void)word; }
#endif

enum { LOOKS = 1000 }; /* about 15 to 40 microseconds */

void *take(Program *program, int64_t bytes) {
    void *memory = program->memory ? program->memory + program->used : NULL;
    program->used += (bytes + 63) / 64 * 64;
    return memory;
}

void append(Program *program, Task *task, const void *job, int64_t job_bytes, int64_t count) {
    Phase *phase = take(program, sizeof(Phase));
    if (!phase) return;
    *phase = (Phase){.task = task, .count = count};
    memcpy(phase->job, job, (size_t)job_bytes);
    if (program->last)
        program->last->following = phase;
    else
        program->first = phase;
    program->last = phase;
}

static void finish_piece(Phase *phase) {
    if (__atomic_add_fetch(&phase->done, 1, __ATOMIC_SEQ_CST) == phase->count &&
        __atomic_load_n(&phase->asleep, __ATOMIC_SEQ_CST))
        wake(&phase->done);
}

static void await(Phase *phase) {
    for (int i = 0; i < LOOKS; i++) {
        if (__atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) == phase->count) return;
        _mm_pause();
    }
    __atomic_add_fetch(&phase->asleep, 1, __ATOMIC_SEQ_CST);
    for (int32_t done; (done = __atomic_load_n(&phase->done, __ATOMIC_SEQ_CST)) < phase->count;)
        sleep_while(&phase->done, done);
}

int64_t run(Program *program, int threads) {
    if (!program->memory) return program->used;
#pragma omp parallel num_threads(threads)
    {
        const int worker = omp_get_thread_num();
        for (Phase *phase = program->first; phase; phase = phase->following) {
            int64_t piece;
            while ((piece = __atomic_fetch_add(&phase->next, 1, __ATOMIC_RELAXED)) < phase->count) {
                phase->task(phase->job, piece, worker);
                finish_piece(phase);
            }
            await(phase);
        }
    }
    return program->used;
}
