// Uninitialised working memory in rows that start on cache lines, so that threads share none.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace kvire {

class Scratch {
  public:
    Scratch() = default;
    Scratch(int64_t rows, int64_t floats) : stride_((floats + 15) / 16 * 16) {
        const size_t bytes = static_cast<size_t>(rows * stride_) * sizeof(float);
        memory_.reset(static_cast<float*>(::operator new(bytes, kLine)));
    }

    float* row(int64_t index) const { return memory_.get() + index * stride_; }

  private:
    static constexpr std::align_val_t kLine{64};

    struct Free {
        void operator()(float* memory) const { ::operator delete(memory, kLine); }
    };

    int64_t stride_ = 0;
    std::unique_ptr<float, Free> memory_;
};

}  // namespace kvire
