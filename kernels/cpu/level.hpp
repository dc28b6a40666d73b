// Dispatch levels: which instruction set the inner loops in use were compiled for. Chosen when the extension is loaded.
#pragma once

#include <string>
#include <vector>

#include "blake3.hpp"
#include "classes.hpp"
#include "coders.hpp"
#include "spans.hpp"

namespace dcr {

struct Level {
    const char* name;
    const Spans* spans;
    const Coders* coders;
    const Classers* classers;
    const Hashers* hashers;
};

// The levels that this machine can run, lowest first; "portable" is always there.
const std::vector<Level>& levels();

// The level in use: the highest, unless another was asked for.
const Level& level();

// Throws std::invalid_argument if this machine has no such level. Calls that are under way keep the level they have.
const Level& use_level(const std::string& name);

}  // namespace dcr
