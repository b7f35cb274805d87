// Native code for CPUs other than expert mixtures (mixture.cpp).
#include "attention.h"
#include "softmax.h"
#include "unpack.h"
