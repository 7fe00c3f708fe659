// IEEE binary16 and bfloat16 as bits, rounded to nearest even from double, so that nothing is rounded twice.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace shim {

template <int digits, int bias> struct Narrow {  // digits of the significand, the leading one counted
    static constexpr int stored = digits - 1, special = 2 * bias + 1;

    static uint16_t encode(double x) {
        const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        if (std::isnan(x)) return special << stored | 1 << (stored - 1);
        if (std::isinf(x)) return sign | special << stored;
        int exponent;
        std::frexp(x, &exponent);  // |x| < 2^exponent
        const int lowest = 2 - bias - digits;  // exponent of the smallest subnormal
        const int unit = exponent - digits > lowest ? exponent - digits : lowest;
        const int steps = int(std::nearbyint(std::ldexp(std::fabs(x), -unit)));
        if (!steps) return sign;
        // A significand of `steps` units with its leading bit added to the exponent field, carries included.
        const int bits = steps + ((unit - lowest) << stored);
        return sign | uint16_t(bits < special << stored ? bits : special << stored);
    }

    static float decode(uint16_t bits) {
        const int field = bits >> stored & special, fraction = bits & ((1 << stored) - 1);
        const int lowest = 2 - bias - digits;
        const float size = field == special ? (fraction ? NAN : INFINITY)
                           : field          ? std::ldexp(float(fraction + (1 << stored)), lowest + field - 1)
                                            : std::ldexp(float(fraction), lowest);
        return bits & 0x8000 ? -size : size;
    }
};

}  // namespace shim
