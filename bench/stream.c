/* Reads memory as fast as the cores allow: ./stream THREADS MEBIBYTES PASSES prints the best GB/s of the passes.
   Integers, because a compiler may reorder their sums and so uses the widest registers. Large pages where the system
   gives them: what is wanted is the limit. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static uint64_t *data;
static size_t words;
static int threads, passes;
static pthread_barrier_t barrier;
static volatile uint64_t sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *reader(void *argument) {
    size_t rank = (size_t)argument, share = words / threads;
    const uint64_t *mine = data + rank * share;
    memset((void *)mine, 1, share * sizeof *mine); /* each thread touches its own part first */
    double best = 1e30;
    for (int pass = 0; pass < passes; pass++) {
        pthread_barrier_wait(&barrier);
        double start = now();
        uint64_t sum[32] = {0};
        for (size_t i = 0; i + 32 <= share; i += 32)
            for (int lane = 0; lane < 32; lane++) sum[lane] += mine[i + lane];
        uint64_t total = 0;
        for (int lane = 0; lane < 32; lane++) total += sum[lane];
        sink += total;
        pthread_barrier_wait(&barrier);
        double seconds = now() - start;
        if (seconds < best) best = seconds;
    }
    if (rank == 0) printf("%.3f\n", words * sizeof *data / best / 1e9);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    threads = atoi(argv[1]);
    passes = atoi(argv[3]);
    words = (size_t)atol(argv[2]) * (1 << 20) / sizeof *data / threads * threads;
    size_t bytes = words * sizeof *data;
    if (threads < 1 || passes < 1 || posix_memalign((void **)&data, 2 << 20, bytes)) return 1;
    madvise(data, bytes, MADV_HUGEPAGE);
    pthread_barrier_init(&barrier, NULL, threads);
    pthread_t *pool = malloc(threads * sizeof *pool);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&pool[i], NULL, reader, (void *)(size_t)i)) return 1;
    for (int i = 0; i < threads; i++) pthread_join(pool[i], NULL);
    return 0;
}
