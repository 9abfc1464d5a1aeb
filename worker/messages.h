/* Chat messages from JSON: [{"role": "user", "content": "..."}, ...] to the engine's chat_message.  `content`
 * is a string or, an assistant's, a list of {"type": "text" | "python" | "python_output", "text": "..."}.
 * Pure functions; any thread. */
#ifndef COP_MESSAGES_H
#define COP_MESSAGES_H

#include <jansson.h>

#include "engine/tokenizer.h"

/* Zeroed: empty.  The texts are borrowed from the JSON value, which must outlive this. */
typedef struct message_list {
    chat_message *messages;
    chat_part *parts; /* of all messages, one after the other */
    size_t n;
} message_list;

/* Read an array of messages.  Their order is the business of chat_render() and chat_prompt().
 * Errors: COP_EINVAL with the key, such as "messages[2].content[0].type", for a missing, wrong or unknown
 * key; COP_ENOMEM. *list is then empty. */
cop_status messages_read(message_list *list, const json_t *array, cop_error *err);
void messages_free(message_list *list);

#endif
