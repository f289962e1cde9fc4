#include "parallel.h"

#include <atomic>

#include "openmp_runtime.h"
#include "thread_pool.h"

namespace kvire {
namespace {

struct Job {
    TaskFunction function;
    void* context;
    int64_t tasks;
    std::atomic<int64_t> next_task{0};
    std::atomic<int> next_worker{0};
};

// What every thread of a region runs. A worker number is drawn rather than asked of the runtime, so that it is
// dense whatever the runtime does; tasks are drawn one by one, so that a slow core takes fewer.
void work(void* argument) {
    Job& job = *static_cast<Job*>(argument);
    const int worker = job.next_worker.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
        const int64_t task = job.next_task.fetch_add(1, std::memory_order_relaxed);
        if (task >= job.tasks) return;
        job.function(job.context, task, worker);
    }
}

}  // namespace

void run_tasks(int64_t tasks, int threads, TaskFunction function, void* context) {
    Job job{function, context, tasks};
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1) return work(&job);
    if (const OpenMPRuntime* runtime = openmp_runtime()) {
        runtime->parallel(work, &job, static_cast<unsigned>(threads), 0);
    } else {
        ThreadPool::shared().run(work, &job, threads);
    }
}

const char* thread_runtime() {
    const OpenMPRuntime* runtime = openmp_runtime();
    return runtime ? runtime->path.c_str() : "own threads";
}

}  // namespace kvire
