// Running independent tasks on several threads, without a second set of threads beside torch's.
//
// torch computes with OpenMP, whose threads spin for a while after each region; a pool of our own would fight
// them for the cores. So the OpenMP runtime that is already in the process is looked up and used; only where
// there is none do threads of our own start.
#pragma once

#include <cstdint>

namespace kvire {

// task: 0 .. tasks - 1, each exactly once, in no particular order. worker: below `threads`, and never the same
// at one time for two tasks. Must not throw.
using TaskFunction = void (*)(void* context, int64_t task, int worker);

void run_tasks(int64_t tasks, int threads, TaskFunction function, void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& body) {
    run_tasks(tasks, threads, [](void* f, int64_t task, int worker) { (*static_cast<F*>(f))(task, worker); }, &body);
}

// The library whose threads are used, or "own threads".
const char* thread_runtime();

}  // namespace kvire
