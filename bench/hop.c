/* How far the first two processors of this process are apart: ./hop prints the nanoseconds that a written word takes
   from one to the other, the least mean of several passes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

enum { PASSES = 8, TURNS = 400 };

static _Alignas(128) atomic_int word;
static int places[2];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void stay(int place) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(place, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *answer(void *argument) {
    (void)argument;
    stay(places[1]);
    for (int turn = 0; turn < PASSES * TURNS; turn++) {
        while (atomic_load_explicit(&word, memory_order_acquire) != 2 * turn + 1) {}
        atomic_store_explicit(&word, 2 * turn + 2, memory_order_release);
    }
    return NULL;
}

int main(void) {
    cpu_set_t mine;
    int found = 0;
    if (sched_getaffinity(0, sizeof mine, &mine)) return 1;
    for (int place = 0; place < CPU_SETSIZE && found < 2; place++)
        if (CPU_ISSET(place, &mine)) places[found++] = place;
    if (found < 2) return 2;
    pthread_t other;
    stay(places[0]);
    if (pthread_create(&other, NULL, answer, NULL)) return 1;
    double best = 1e30;
    for (int pass = 0; pass < PASSES; pass++) {
        double start = now();
        for (int turn = pass * TURNS; turn < (pass + 1) * TURNS; turn++) {
            atomic_store_explicit(&word, 2 * turn + 1, memory_order_release);
            while (atomic_load_explicit(&word, memory_order_acquire) != 2 * turn + 2) {}
        }
        double mean = (now() - start) / TURNS / 2;
        if (mean < best) best = mean;
    }
    pthread_join(other, NULL);
    printf("%.1f\n", best);
    return 0;
}
