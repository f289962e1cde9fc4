// Threads of our own, for processes without an OpenMP runtime.
#pragma once

#include <condition_variable>
#include <mutex>

namespace kvire {

class ThreadPool {
  public:
    // Never destroyed: its threads sleep until the process ends.
    static ThreadPool& shared();

    // Runs fn(data) on `threads` threads, the calling one included, and waits for them. One caller at a time;
    // others wait.
    void run(void (*fn)(void*), void* data, int threads);

  private:
    void grow(int helpers);
    void help();

    std::mutex one_caller_;
    std::mutex state_;
    std::condition_variable work_, done_;
    void (*fn_)(void*) = nullptr;
    void* data_ = nullptr;
    int wanted_ = 0;   // helpers that have yet to take up the current job
    int running_ = 0;  // helpers that have taken it up and not finished
    int helpers_ = 0;  // threads started so far
};

}  // namespace kvire
