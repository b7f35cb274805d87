// Calls a function of a shared library with a struct and the memory that it points to; usage: caller LIBRARY FUNCTION.
//
// Standard input has 64-bit numbers, the struct and the memory:
//
//     size of the struct, number of blocks of memory, number of pointers
//     size of each block
//     for each pointer: its offset in the struct, the block that it points into, the offset there
//     the struct, then the blocks
//
// Standard output has the function's result, then the blocks.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void receive(void* to, size_t size) {
    if (std::fread(to, 1, size, stdin) != size) std::exit(3);
}

static std::vector<int64_t> receive_numbers(int64_t count) {
    std::vector<int64_t> numbers(count);
    receive(numbers.data(), count * sizeof(int64_t));
    return numbers;
}

int main(int, char** words) {
    void* library = dlopen(words[1], RTLD_NOW);
    void* function = library ? dlsym(library, words[2]) : nullptr;
    if (!function) return std::fprintf(stderr, "%s\n", dlerror()), 2;

    const std::vector<int64_t> counts = receive_numbers(3), sizes = receive_numbers(counts[1]);
    const std::vector<int64_t> pointers = receive_numbers(3 * counts[2]);
    std::vector<char> argument(counts[0]);
    receive(argument.data(), argument.size());
    std::vector<char*> blocks;
    for (int64_t size : sizes) {
        blocks.push_back((char*)std::aligned_alloc(64, (size + 63) / 64 * 64));
        receive(blocks.back(), size);
    }
    for (size_t i = 0; i < pointers.size(); i += 3) {
        char* address = blocks[pointers[i + 1]] + pointers[i + 2];
        std::memcpy(argument.data() + pointers[i], &address, sizeof address);
    }

    const int64_t result = ((int64_t (*)(void*))function)(argument.data());
    std::fwrite(&result, sizeof result, 1, stdout);
    for (size_t i = 0; i < blocks.size(); ++i) std::fwrite(blocks[i], 1, sizes[i], stdout);
}
