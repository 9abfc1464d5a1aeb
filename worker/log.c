/* Log lines on stderr. */
#include "worker/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

void log_event(log_level level, const char *format, ...) {
    static const char *const names[] = {"debug", "info", "warning", "error"};
    if (level == LOG_DEBUG) return; /* nobody asks for them yet */
    char line[1024], when[32];
    struct timespec t;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &utc);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &utc);
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(stderr, "%s.%03ldZ %s %s\n", when, t.tv_nsec / 1000000, names[level], line); /* one write: stderr is unbuffered
                                                                                           but stdio locks it */
}
