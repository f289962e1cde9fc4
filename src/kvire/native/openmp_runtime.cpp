#include "openmp_runtime.h"

#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>

#include <vector>
#endif

namespace kvire {
namespace {

#ifdef __linux__

int collect(dl_phdr_info* object, size_t, void* paths) {
    const char* path = object->dlpi_name ? object->dlpi_name : "";
    const char* file = std::strrchr(path, '/');
    file = file ? file + 1 : path;
    const bool openmp = !std::strncmp(file, "libgomp", 7) || !std::strncmp(file, "libomp", 6) ||
                        !std::strncmp(file, "libiomp5", 8);
    if (!openmp) return 0;
    // Several packages may have brought a copy each; torch's, if it has one, goes first.
    auto& found = *static_cast<std::vector<std::string>*>(paths);
    found.insert(std::strstr(path, "torch") ? found.begin() : found.end(), path);
    return 0;
}

const OpenMPRuntime* find() {
    const char* wanted = std::getenv("KVIRE_OPENMP");
    if (wanted && !std::strcmp(wanted, "0")) return nullptr;
    std::vector<std::string> paths;
    dl_iterate_phdr(collect, &paths);
    for (const std::string& path : paths) {
        void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (!library) continue;
        if (void* entry = dlsym(library, "GOMP_parallel"))
            return new OpenMPRuntime{path, reinterpret_cast<decltype(OpenMPRuntime::parallel)>(entry)};
        dlclose(library);
    }
    return nullptr;
}

#else

const OpenMPRuntime* find() { return nullptr; }

#endif

}  // namespace

const OpenMPRuntime* openmp_runtime() {
    static const OpenMPRuntime* const runtime = find();
    return runtime;
}

}  // namespace kvire
