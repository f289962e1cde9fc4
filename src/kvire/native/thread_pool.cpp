#include "thread_pool.h"

#include <system_error>
#include <thread>

namespace kvire {

ThreadPool& ThreadPool::shared() {
    static ThreadPool* pool = new ThreadPool;
    return *pool;
}

void ThreadPool::grow(int helpers) {
    while (helpers_ < helpers) {
        try {
            std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {
            return;  // the system gives no more threads: fewer do the same work
        }
        ++helpers_;
    }
}

void ThreadPool::help() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
        work_.wait(lock, [this] { return wanted_ > 0; });
        --wanted_;
        ++running_;
        const auto fn = fn_;
        void* const data = data_;
        lock.unlock();
        fn(data);
        lock.lock();
        if (--running_ == 0) done_.notify_one();
    }
}

void ThreadPool::run(void (*fn)(void*), void* data, int threads) {
    std::lock_guard<std::mutex> caller(one_caller_);
    {
        std::lock_guard<std::mutex> lock(state_);
        grow(threads - 1);
        fn_ = fn;
        data_ = data;
        wanted_ = threads - 1 < helpers_ ? threads - 1 : helpers_;
    }
    work_.notify_all();
    fn(data);
    std::unique_lock<std::mutex> lock(state_);
    wanted_ = 0;  // a helper that is still asleep would find nothing left to do
    done_.wait(lock, [this] { return running_ == 0; });
}

}  // namespace kvire
