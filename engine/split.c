/* nanochat's split pattern by hand.  At each place the first rule that matches takes a piece:
 *
 *   1  '(?i:[sdmt]|ll|ve|re)              an English contraction
 *   2  [^\r\n\p{L}\p{N}]?+\p{L}+          letters, with one character before them
 *   3  \p{N}{1,2}                         numbers in small groups (GPT-4: {1,3})
 *   4   ?[^\s\p{L}\p{N}]++[\r\n]*         others, with a blank before and line ends after them
 *   5  \s*[\r\n]                          spaces up to the last line end among them
 *   6  \s+(?!\S)                          spaces but for the last one before something else
 *   7  \s+                                that last one, where no rule above took it along
 */
#include "engine/split.h"

#include <assert.h>
#include <string.h>

#include "engine/utf8.h"

#define PATTERN_HEAD "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define PATTERN_TAIL "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"

static const struct {
    const char *text;
    int max_numbers;
} patterns[] = {
    {PATTERN_HEAD "\\p{N}{1,2}" PATTERN_TAIL, 2}, /* nanochat's own */
    {PATTERN_HEAD "\\p{N}{1,3}" PATTERN_TAIL, 3}, /* rustbpe's default */
    {PATTERN_HEAD "\\p{N}{1,1}" PATTERN_TAIL, 1},
};

cop_status split_pattern(const char *pattern, size_t n, int *max_numbers, cop_error *err) {
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        if (n != strlen(patterns[i].text) || memcmp(pattern, patterns[i].text, n) != 0) continue;
        *max_numbers = patterns[i].max_numbers;
        return COP_OK;
    }
    return cop_fail(
        err, COP_EUNSUPPORTED,
        "cannot split text by the pattern \"%.*s\"%s: only nanochat's is known, with number groups "
        "{1,1}, {1,2} or {1,3}",
        n < 300 ? (int)n : 300, pattern, n < 300 ? "" : "...");
}

static bool is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

unicode_class split_class(uint32_t code) {
    if (is_space(code)) return UNICODE_SPACE;
    int low = 0, high = unicode_n_ranges; /* the range, if there is one, is in low .. high - 1 */
    while (low < high) {
        int mid = low + (high - low) / 2;
        const unicode_range *r = &unicode_ranges[mid];
        if (code < r->first)
            high = mid;
        else if (code > r->last)
            low = mid + 1;
        else
            return r->kind;
    }
    return UNICODE_OTHER;
}

/* One character of the text; at the end len is 0, and no rule matches that. */
typedef struct character {
    uint32_t code;
    size_t len;
    unicode_class kind;
} character;

static character read_character(const char *text, size_t n, size_t pos) {
    character c = {0, 0, UNICODE_OTHER};
    if (pos >= n) return c;
    bool valid = utf8_read(text + pos, n - pos, &c.code, &c.len);
    assert(valid);
    c.kind = split_class(c.code);
    return c;
}

/* The end of the run of one class that begins at pos, at most max characters. */
static size_t skip_class(const char *text, size_t n, size_t pos, unicode_class kind, size_t max) {
    for (size_t i = 0; i < max; i++) {
        character c = read_character(text, n, pos);
        if (c.len == 0 || c.kind != kind) break;
        pos += c.len;
    }
    return pos;
}

static bool is_line_end(uint32_t code) { return code == '\r' || code == '\n'; }

static char ascii_lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c; }

/* Rule 1: the length of a contraction at the start, 0 if there is none.  U+017F, the long s, is an s to (?i).
 */
static size_t contraction(const char *text, size_t n) {
    if (n < 2 || text[0] != '\'') return 0;
    char a = ascii_lower(text[1]);
    if (a == 's' || a == 'd' || a == 'm' || a == 't') return 2;
    if (n < 3) return 0;
    if (memcmp(text + 1, "\xC5\xBF", 2) == 0) return 3;
    char b = ascii_lower(text[2]);
    return (a == 'l' && b == 'l') || ((a == 'v' || a == 'r') && b == 'e') ? 3 : 0;
}

/* Rules 5 to 7, for a run of spaces at the start. */
static size_t spaces(const char *text, size_t n) {
    size_t pos = 0, after_line_end = 0, last = 0; /* where the last character of the run starts */
    for (;;) {
        character c = read_character(text, n, pos);
        if (c.kind != UNICODE_SPACE) break;
        last = pos;
        pos += c.len;
        if (is_line_end(c.code)) after_line_end = pos;
    }
    if (after_line_end) return after_line_end;
    return pos == n || last == 0 ? pos : last;
}

size_t split_piece(const char *text, size_t n, int max_numbers) {
    assert(n > 0);
    size_t len = contraction(text, n);
    if (len) return len;
    character c = read_character(text, n, 0), next = read_character(text, n, c.len);
    if (c.kind == UNICODE_LETTER) return skip_class(text, n, 0, UNICODE_LETTER, SIZE_MAX);
    if (c.kind == UNICODE_NUMBER) return skip_class(text, n, 0, UNICODE_NUMBER, (size_t)max_numbers);
    if (!is_line_end(c.code) && next.kind == UNICODE_LETTER)
        return skip_class(text, n, c.len, UNICODE_LETTER, SIZE_MAX);
    bool blank_before = c.code == ' ' && next.len && next.kind == UNICODE_OTHER;
    if (c.kind == UNICODE_SPACE && !blank_before) return spaces(text, n);
    size_t pos = skip_class(text, n, blank_before ? 1 : 0, UNICODE_OTHER, SIZE_MAX);
    while (pos < n && is_line_end((uint8_t)text[pos])) pos++;
    return pos;
}
