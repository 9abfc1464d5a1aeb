/* Log lines on stderr: `TIME LEVEL event key=value ...`, one line per event, the unit in the key.  Any thread. */
#ifndef COP_LOG_H
#define COP_LOG_H

typedef enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARNING, LOG_ERROR } log_level;

void log_event(log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
