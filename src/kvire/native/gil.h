#pragma once
#include <Python.h>

namespace kvire {

// Lets other Python threads run while this lives. Where Python has ended meanwhile, the thread stays here for ever:
// nothing of Python may be touched any more, and the process is about to go.
class GilReleased {
public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;
    ~GilReleased();

private:
    PyThreadState* state_;
};

}  // namespace kvire
