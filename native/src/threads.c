/* A small pool of threads, made on demand and kept until the library goes.
 *
 * Not OpenMP: a second OpenMP runtime next to torch's spins against it for the same cores, needing
 * libgomp would break the wheel on slim images, and OpenMP regions hang in a forked child. */
#include <fenv.h>
#include <pthread.h>
#include <signal.h>

#include "internal.h"

enum { MAX_WORKERS = 255 };

struct job {
  zo_work *work;
  void *context;
  int64_t tiles;
  int threads;
};

struct worker {
  pthread_t thread;
  int share;          /* which of a job's shares is this worker's; the caller has share 0 */
  uint64_t jobs_seen; /* set by whoever makes the worker, so that it cannot miss its first job */
};

static struct {
  pthread_mutex_t turn; /* held by the caller whose job the pool has */
  pthread_mutex_t lock; /* protects all below */
  pthread_cond_t job_posted;
  pthread_cond_t job_done;
  struct job job;
  uint64_t jobs_posted;
  int shares_left;
  int closing;
  int worker_count;
  struct worker workers[MAX_WORKERS];
} pool = {
    .turn = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .job_posted = PTHREAD_COND_INITIALIZER,
    .job_done = PTHREAD_COND_INITIALIZER,
};

/* Ranges in order of address, one for each thread: their lengths differ by one tile at most. */
static void do_share(const struct job *job, int share) {
  const int64_t base = job->tiles / job->threads;
  const int64_t extra = job->tiles % job->threads;
  const int64_t first = share * base + (share < extra ? share : extra);
  job->work(job->context, first, first + base + (share < extra));
}

static void *worker_main(void *argument) {
  struct worker *self = argument;
  fesetenv(FE_DFL_ENV); /* a thread inherits its maker's */
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (self->jobs_seen == pool.jobs_posted && !pool.closing) {
      pthread_cond_wait(&pool.job_posted, &pool.lock);
    }
    if (pool.closing) {
      break;
    }
    self->jobs_seen = pool.jobs_posted;
    const struct job job = pool.job;
    if (self->share >= job.threads) {
      continue;
    }
    pthread_mutex_unlock(&pool.lock);
    do_share(&job, self->share);
    pthread_mutex_lock(&pool.lock);
    if (--pool.shares_left == 0) {
      pthread_cond_signal(&pool.job_done);
    }
  }
  pthread_mutex_unlock(&pool.lock);
  return NULL;
}

/* Under both locks. Fewer workers than asked for, where the system has no more, is no error. */
static void ensure_workers(int wanted) {
  if (pool.worker_count >= wanted) {
    return;
  }
  sigset_t all, users; /* signals are for the interpreter's threads */
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &users);
  while (pool.worker_count < wanted) {
    struct worker *worker = &pool.workers[pool.worker_count];
    worker->share = pool.worker_count + 1;
    worker->jobs_seen = pool.jobs_posted;
    if (pthread_create(&worker->thread, NULL, worker_main, worker) != 0) {
      break;
    }
    pool.worker_count++;
  }
  pthread_sigmask(SIG_SETMASK, &users, NULL);
}

/* In a forked child: the workers stayed with the parent, and the locks may be in any state. */
static void forget_workers(void) {
  pool.turn = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  pool.job_posted = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.job_done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.worker_count = 0;
}

__attribute__((constructor)) static void open_pool(void) {
  pthread_atfork(NULL, NULL, forget_workers);
}

__attribute__((destructor)) static void close_pool(void) {
  pthread_mutex_lock(&pool.turn);
  pthread_mutex_lock(&pool.lock);
  pool.closing = 1;
  pthread_cond_broadcast(&pool.job_posted);
  pthread_mutex_unlock(&pool.lock);
  for (int i = 0; i < pool.worker_count; i++) {
    pthread_join(pool.workers[i].thread, NULL);
  }
  pool.worker_count = 0;
  pthread_mutex_unlock(&pool.turn);
}

static void run(zo_work *work, void *context, int64_t tiles, int threads) {
  struct job job = {work, context, tiles, threads};
  if (job.threads > tiles) {
    job.threads = (int)tiles;
  }
  if (job.threads > MAX_WORKERS + 1) {
    job.threads = MAX_WORKERS + 1;
  }
  if (job.threads <= 1 || pthread_mutex_trylock(&pool.turn) != 0) {
    work(context, 0, tiles); /* another thread has the pool: this one works by itself */
    return;
  }
  pthread_mutex_lock(&pool.lock);
  if (!pool.closing) { /* at exit a daemon thread may come late */
    ensure_workers(job.threads - 1);
  }
  if (job.threads > pool.worker_count + 1) {
    job.threads = pool.worker_count + 1;
  }
  pool.job = job;
  pool.jobs_posted++;
  pool.shares_left = job.threads - 1;
  pthread_cond_broadcast(&pool.job_posted);
  pthread_mutex_unlock(&pool.lock);

  do_share(&job, 0);

  pthread_mutex_lock(&pool.lock);
  while (pool.shares_left > 0) {
    pthread_cond_wait(&pool.job_done, &pool.lock);
  }
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&pool.turn);
}

void zo_parallel(zo_work *work, void *context, int64_t tiles, int threads) {
  fenv_t callers;
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  run(work, context, tiles, threads);
  fesetenv(&callers);
}

void zo_parallel_elements(zo_work *work, void *context, int64_t n, int threads) {
  /* Waking a thread costs more than it saves on less than two tiles. */
  const int useful = n < 2 * ZO_TILE ? 1 : threads;
  zo_parallel(work, context, n / ZO_TILE + (n % ZO_TILE != 0), useful);
}
