#include "gil.h"

#include <chrono>
#include <thread>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace kvire {
namespace {

[[noreturn]] void stay() {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

// Before 3.14 Python ends a daemon thread that comes back too late by pthread_exit. glibc does that by unwinding the
// stack like an exception, which may not leave a destructor: the process would end with "terminate called" and SIGABRT.
GilReleased::~GilReleased() {
#if defined(__GLIBCXX__)
    try {
        PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
        stay();
    }
#else
    PyEval_RestoreThread(state_);
#endif
}

}  // namespace kvire
