/* A pool of threads that wait for work between calls. The caller works too, so it needs one thread fewer. */
#include <pthread.h>

#include "native.h"

enum { MOST = 256 };

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER, guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begin = PTHREAD_COND_INITIALIZER, end = PTHREAD_COND_INITIALIZER;
static struct {
    void (*work)(void *, int, int);
    void *context;
    int threads, running, started;
    unsigned long job, job_at_birth[MOST];
} pool;

static void *wait_for_work(void *number)
{
    const int own = (int)(intptr_t)number;
    pthread_mutex_lock(&guard);
    unsigned long done = pool.job_at_birth[own - 1]; /* later jobs are for this thread, however late it starts */
    for (;;) {
        while (pool.job == done)
            pthread_cond_wait(&begin, &guard);
        done = pool.job;
        if (own >= pool.threads)
            continue;
        pthread_mutex_unlock(&guard);
        pool.work(pool.context, own, pool.threads);
        pthread_mutex_lock(&guard);
        if (--pool.running == 0)
            pthread_cond_signal(&end);
    }
    return NULL;
}

/* A forked child has none of its parent's threads, and locks in any state: start afresh. */
static void forget(void)
{
    pthread_mutex_init(&one_caller, NULL);
    pthread_mutex_init(&guard, NULL);
    pthread_cond_init(&begin, NULL);
    pthread_cond_init(&end, NULL);
    pool.started = 0;
    pool.job = 0;
}

/* Starts threads up to `count`; returns the number of threads besides the caller. */
static int start(int count)
{
    static int registered;
    if (!registered)
        registered = pthread_atfork(NULL, NULL, forget) == 0;
    for (; pool.started < count && pool.started < MOST; pool.started++) {
        pthread_t thread;
        pool.job_at_birth[pool.started] = pool.job;
        if (pthread_create(&thread, NULL, wait_for_work, (void *)(intptr_t)(pool.started + 1)) != 0)
            break;
        pthread_detach(thread);
    }
    return pool.started;
}

void run_in_threads(void (*work)(void *, int, int), void *context, int threads)
{
    if (threads <= 1) {
        work(context, 0, 1);
        return;
    }
    pthread_mutex_lock(&one_caller);
    int helpers = start(threads - 1);
    if (helpers < threads - 1) { /* no more threads could be started: run the same parts one after the other */
        for (int number = 0; number < threads; number++)
            work(context, number, threads);
    } else {
        pthread_mutex_lock(&guard);
        pool.work = work, pool.context = context, pool.threads = threads;
        pool.running = threads - 1;
        pool.job++;
        pthread_cond_broadcast(&begin);
        pthread_mutex_unlock(&guard);
        work(context, 0, threads);
        pthread_mutex_lock(&guard);
        while (pool.running > 0)
            pthread_cond_wait(&end, &guard);
        pthread_mutex_unlock(&guard);
    }
    pthread_mutex_unlock(&one_caller);
}
