// What native code does on a CPU beside mixtures (adapters/mixture.cpp).
#include "attention.h"
#include "softmax.h"
