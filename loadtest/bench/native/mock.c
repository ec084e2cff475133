/* An OpenAI-style engine that costs next to nothing: one thread, epoll, HTTP/1.1 keep-alive, several ports.
 *
 *     mock PORTS          listens on so many free loopback ports and prints {"ports": [...]}
 *
 * Chat completions are answered whole or as a stream. A stream has `max_tokens` content chunks, `seed` milliseconds
 * apart (any gateway passes these fields on); each is one server-sent event in one HTTP chunk in one write, stamped
 * with the time of that write. A client that does not read is not written to: the stream stands still and goes on from
 * there. `stream_options.include_usage` is honoured. Ends when its standard input is closed.
 */
#include "wire.h"

enum { READ_SIZE = 1 << 18, SCANNED = 2048, EVENTS = 512, BYTES_PER_TOKEN = 4 };

typedef struct connection {
    int fd, port_index;          /* port_index >= 0 only for listeners */
    int dead, waits_to_write;
    buffer in, out;
    size_t head_length, body_length;
    int head_known, chunked;
    /* The stream in progress */
    int streaming, usage_asked, place; /* place in the heap of due times, -1 outside */
    long chunks_left, chunks_sent;
    uint64_t interval_us, due_us;
    size_t prompt_tokens; /* in proportion to the body: gateways learn from what engines report */
    struct connection *next_dead;
} connection;

static int poller;
static connection **heap;
static int heap_used, heap_size;
static connection *graveyard; /* freed after the events at hand: some may still point there */
static unsigned long running, generated;

/* --- the heap of due times */

static void heap_put(int place, connection *c) { heap[place] = c; c->place = place; }

static void heap_up(int place) {
    connection *c = heap[place];
    for (int parent; place && heap[parent = (place - 1) / 2]->due_us > c->due_us; place = parent)
        heap_put(place, heap[parent]);
    heap_put(place, c);
}

static void heap_down(int place) {
    connection *c = heap[place];
    for (int child; (child = 2 * place + 1) < heap_used; place = child) {
        if (child + 1 < heap_used && heap[child + 1]->due_us < heap[child]->due_us) child++;
        if (heap[child]->due_us >= c->due_us) break;
        heap_put(place, heap[child]);
    }
    heap_put(place, c);
}

static void schedule(connection *c, uint64_t due_us) {
    c->due_us = due_us;
    if (c->place < 0) {
        if (heap_used == heap_size) {
            heap_size = heap_size ? 2 * heap_size : 1024;
            heap = must(realloc(heap, sizeof *heap * (size_t)heap_size));
        }
        heap_put(heap_used, c);
        heap_up(heap_used++);
    } else {
        heap_up(c->place);
        heap_down(c->place);
    }
}

static void unschedule(connection *c) {
    int place = c->place;
    if (place < 0) return;
    c->place = -1;
    if (place == --heap_used) return;
    heap_put(place, heap[heap_used]);
    heap_up(place);
    heap_down(place);
}

/* --- connections */

static void bury(connection *c) {
    if (c->dead) return;
    c->dead = 1;
    if (c->streaming) running--;
    unschedule(c);
    close(c->fd);
    c->next_dead = graveyard;
    graveyard = c;
}

static void await_room(connection *c, int wanted) {
    if (c->waits_to_write == wanted) return;
    c->waits_to_write = wanted;
    watch(poller, EPOLL_CTL_MOD, c->fd, EPOLLIN | (wanted ? EPOLLOUT : 0u), c);
}

static void flush_output(connection *c) {
    ssize_t n = send(c->fd, c->out.data, c->out.used, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return bury(c);
    if (n > 0) buffer_drop(&c->out, (size_t)n);
    await_room(c, c->out.used > 0);
    if (!c->out.used && c->streaming && c->place < 0) schedule(c, now_us()); /* it stood still: go on */
}

static void write_out(connection *c, const char *data, size_t length) {
    if (c->dead) return;
    ssize_t n = c->out.used ? 0 : send(c->fd, data, length, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return bury(c);
    if (n < 0) n = 0;
    if ((size_t)n == length) return;
    buffer_add(&c->out, data + n, length - (size_t)n);
    await_room(c, 1);
}

/* --- answers */

static const char WHOLE[] =
    "{\"id\":\"chatcmpl-0a6f6e3d5b1c4e7f9a2b8c7d6e5f4a3b\",\"object\":\"chat.completion\",\"created\":1790000000,"
    "\"model\":\"bench-model\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Water "
    "enters the headrace above the turbines, and gates along it decide how much each of them gets; what none of them "
    "needs goes over the weir.\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":32,\"total_tokens\":%zu},\"system_fingerprint\":null}";

static void answer(connection *c, const char *status, const char *type, const char *body) {
    char text[4096];
    int n = snprintf(text, sizeof text,
                     "HTTP/1.1 %s\r\ndate: Mon, 02 Nov 2026 12:00:00 GMT\r\nserver: mock\r\ncontent-length: %zu\r\n"
                     "content-type: %s\r\n\r\n%s", status, strlen(body), type, body);
    write_out(c, text, (size_t)n);
}

/* One event as one HTTP chunk; returns its length. */
static int event_chunk(char *to, const char *choices, const char *usage) {
    char event[512];
    int n = snprintf(event, sizeof event,
                     "data: {\"id\":\"chatcmpl-0a6f6e3d5b1c4e7f9a2b8c7d6e5f4a3b\",\"object\":\"chat.completion.chunk\","
                     "\"created\":1790000000,\"model\":\"bench-model\",\"choices\":[%s]%s}\n\n", choices, usage);
    return sprintf(to, "%x\r\n%s\r\n", (unsigned)n, event);
}

static int delta_chunk(char *to, const char *delta, const char *finish) {
    char choice[256];
    snprintf(choice, sizeof choice, "{\"index\":0,\"delta\":{%s},\"logprobs\":null,\"finish_reason\":%s}",
             delta, finish);
    return event_chunk(to, choice, "");
}

static void end_stream(connection *c, char *text, int n) {
    n += delta_chunk(text + n, "", "\"stop\"");
    if (c->usage_asked) {
        char usage[128];
        snprintf(usage, sizeof usage,
                 ",\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%ld,\"total_tokens\":%zu}",
                 c->prompt_tokens, c->chunks_sent, c->prompt_tokens + (size_t)c->chunks_sent);
        n += event_chunk(text + n, "", usage);
    }
    n += sprintf(text + n, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    unschedule(c);
    c->streaming = 0;
    running--;
    write_out(c, text, (size_t)n);
}

static void send_token(connection *c) {
    char text[2560], delta[64];
    if (c->out.used) return unschedule(c); /* back pressure: flush_output wakes it */
    snprintf(delta, sizeof delta, "\"content\":\"t=%0*llu word\"", STAMP_DIGITS, (unsigned long long)now_us());
    int n = delta_chunk(text, delta, "null");
    generated++;
    c->chunks_sent++;
    if (--c->chunks_left <= 0) return end_stream(c, text, n);
    uint64_t now = now_us(), due = c->due_us + c->interval_us;
    /* A late stream keeps its pace from now on; it does not catch up in a burst that no engine would send. */
    schedule(c, due > now ? due : now + c->interval_us);
    write_out(c, text, (size_t)n);
}

/* --- requests */

/* Where `name` stands in the first or last 2 KB of the body: ordinary fields never lie inside a long prompt. */
static const char *field(const char *body, size_t length, const char *name) {
    size_t n = strlen(name), window = length < SCANNED ? length : SCANNED;
    const char *found = memmem(body, window, name, n);
    if (!found) found = memmem(body + length - window, window, name, n);
    if (!found) return NULL;
    for (found += n; *found == ' ' || *found == ':'; found++) {}
    return found;
}

static long number(const char *body, size_t length, const char *name, long otherwise) {
    const char *value = field(body, length, name);
    return value ? strtol(value, NULL, 10) : otherwise;
}

static int is_true(const char *body, size_t length, const char *name) {
    const char *value = field(body, length, name);
    return value && !strncmp(value, "true", 4);
}

static void complete(connection *c, const char *body, size_t length) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ndate: Mon, 02 Nov 2026 12:00:00 GMT\r\nserver: mock\r\n"
        "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    c->prompt_tokens = length / BYTES_PER_TOKEN + 1;
    if (!is_true(body, length, "\"stream\"")) {
        char whole[1024];
        snprintf(whole, sizeof whole, WHOLE, c->prompt_tokens, c->prompt_tokens + 32);
        return answer(c, "200 OK", "application/json", whole);
    }
    c->chunks_left = number(body, length, "\"max_tokens\"", number(body, length, "\"max_completion_tokens\"", 16));
    c->chunks_sent = 0;
    c->interval_us = (uint64_t)number(body, length, "\"seed\"", 20) * 1000u;
    c->usage_asked = is_true(body, length, "\"include_usage\"");
    c->streaming = 1;
    running++;
    char text[1024];
    memcpy(text, head, sizeof head - 1);
    int n = (int)sizeof head - 1;
    n += delta_chunk(text + n, "\"role\":\"assistant\",\"content\":\"\"", "null");
    write_out(c, text, (size_t)n);
    if (!c->dead) schedule(c, now_us()); /* the first token at once */
}

static void report_metrics(connection *c) {
    char page[1024];
    snprintf(page, sizeof page,
             "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"bench-model\"} %lu.0\n"
             "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"bench-model\"} 0.0\n"
             "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"bench-model\"} 0.1\n"
             "# TYPE vllm:generation_tokens_total counter\n"
             "vllm:generation_tokens_total{model_name=\"bench-model\"} %lu.0\n",
             running, generated);
    answer(c, "200 OK", "text/plain; version=0.0.4", page);
}

static int begins(const char *path, const char *with) { return !strncmp(path, with, strlen(with)); }

static void respond(connection *c, const char *path, const char *body, size_t length) {
    if (begins(path, "/v1/chat/completions")) complete(c, body, length);
    else if (begins(path, "/metrics")) report_metrics(c);
    else if (begins(path, "/v1/models"))
        answer(c, "200 OK", "application/json",
               "{\"object\":\"list\",\"data\":[{\"id\":\"bench-model\",\"object\":\"model\",\"created\":1790000000,"
               "\"owned_by\":\"vllm\",\"root\":\"bench-model\",\"max_model_len\":131072}]}");
    else if (begins(path, "/health") || begins(path, "/ping")) answer(c, "200 OK", "text/plain", "");
    /* What routers ask of SGLang and vLLM engines before they believe in them. */
    else if (begins(path, "/get_model_info") || begins(path, "/model_info"))
        answer(c, "200 OK", "application/json",
               "{\"model_path\":\"bench-model\",\"tokenizer_path\":\"bench-model\",\"is_generation\":true,"
               "\"served_model_name\":\"bench-model\"}");
    else if (begins(path, "/get_server_info") || begins(path, "/server_info"))
        answer(c, "200 OK", "application/json",
               "{\"model_path\":\"bench-model\",\"model_id\":\"bench-model\",\"served_model_name\":\"bench-model\","
               "\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5\"}");
    else if (begins(path, "/version")) answer(c, "200 OK", "application/json", "{\"version\":\"0.11.0\"}");
    else answer(c, "404 Not Found", "application/json", "{}");
}

/* The end of a chunked body that begins at `from`, or 0 if it is not whole yet. `to`, if any, takes its data. */
static size_t end_of_chunks(const connection *c, size_t from, char *to, size_t *gathered) {
    for (size_t at = from;;) {
        const char *line = memmem(c->in.data + at, c->in.used - at, "\r\n", 2);
        if (!line) return 0;
        size_t size = strtoul(c->in.data + at, NULL, 16), data = (size_t)(line - c->in.data) + 2;
        if (data + size + 2 > c->in.used) return 0;
        if (to) memmove(to + *gathered, c->in.data + data, size), *gathered += size;
        at = data + size + 2;
        if (!size) return at;
    }
}

static int read_head(connection *c) {
    const char *end = memmem(c->in.data, c->in.used, "\r\n\r\n", 4), *value;
    if (!end) return 0;
    c->head_length = (size_t)(end - c->in.data) + 4;
    c->head_known = 1;
    c->body_length = (value = header(c->in.data, c->head_length, "content-length:")) ? strtoul(value, NULL, 10) : 0;
    c->chunked = header(c->in.data, c->head_length, "transfer-encoding:") != NULL;
    if (header(c->in.data, c->head_length, "expect:")) write_out(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    return 1;
}

/* Takes whole requests from the input, until there is none or one is being streamed. */
static void take_requests(connection *c) {
    while (!c->dead && !c->streaming && c->in.used && (c->head_known || read_head(c))) {
        size_t length = c->body_length, end = c->head_length + length;
        if (c->chunked) {
            if (!(end = end_of_chunks(c, c->head_length, NULL, NULL))) return;
            length = 0;
            end_of_chunks(c, c->head_length, c->in.data + c->head_length, &length);
        }
        if (c->in.used < end) return;
        const char *path = memchr(c->in.data, ' ', c->head_length);
        respond(c, path ? path + 1 : "", c->in.data + c->head_length, length);
        c->head_known = 0;
        if (!c->dead) buffer_drop(&c->in, end);
    }
}

static void read_input(connection *c) {
    for (;;) {
        buffer_reserve(&c->in, READ_SIZE);
        size_t room = c->in.size - c->in.used - 1; /* one byte for the terminator that strtol may run into */
        ssize_t n = recv(c->fd, c->in.data + c->in.used, room, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) return bury(c);
        if (n < 0) return;
        c->in.used += (size_t)n;
        c->in.data[c->in.used] = 0;
        if (!c->streaming) take_requests(c);
        if (c->dead || (size_t)n < room) return;
    }
}

static connection *new_connection(int fd, int port_index) {
    connection *c = must(calloc(1, sizeof *c));
    c->fd = fd;
    c->place = -1;
    c->port_index = port_index;
    watch(poller, EPOLL_CTL_ADD, fd, EPOLLIN, c);
    return c;
}

static void accept_all(connection *listener) {
    int on = 1;
    for (int fd; (fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        new_connection(fd, -1);
    }
}

static int listen_somewhere(int index) {
    struct sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    int fd = loopback_socket();
    if (bind(fd, (void *)&address, length) || listen(fd, 4096) || getsockname(fd, (void *)&address, &length))
        die("listen");
    new_connection(fd, index);
    return ntohs(address.sin_port);
}

static void send_due_tokens(void) {
    uint64_t now = now_us();
    /* Each stream at most once a round, so that a full heap cannot keep new requests waiting. */
    for (int round = heap_used; round > 0 && heap_used && heap[0]->due_us <= now; round--) {
        connection *c = heap[0];
        send_token(c);
        if (!c->streaming) take_requests(c);
    }
}

static void sweep_graveyard(void) {
    while (graveyard) {
        connection *c = graveyard;
        graveyard = c->next_dead;
        buffer_free(&c->in);
        buffer_free(&c->out);
        free(c);
    }
}

int main(int count, char **arguments) {
    int ports = count > 1 ? atoi(arguments[1]) : 1;
    if (ports < 1 || ports > 256) return fprintf(stderr, "usage: mock PORTS (1 to 256)\n"), 2;
    signal(SIGPIPE, SIG_IGN);
    if ((poller = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    printf("{\"ports\": [");
    for (int i = 0; i < ports; i++) printf("%s%d", i ? ", " : "", listen_somewhere(i));
    printf("]}\n");
    fflush(stdout);
    watch(poller, EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN, NULL);
    for (;;) {
        struct epoll_event events[EVENTS];
        int n = wait_until(poller, events, EVENTS, heap_used ? heap[0]->due_us : 0);
        for (int i = 0; i < n; i++) {
            connection *c = events[i].data.ptr;
            char ignored[256];
            if (!c) { if (read(STDIN_FILENO, ignored, sizeof ignored) <= 0) return 0; continue; }
            if (c->port_index >= 0) { accept_all(c); continue; }
            if (!c->dead && (events[i].events & EPOLLOUT)) flush_output(c);
            if (!c->dead && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_input(c);
        }
        send_due_tokens();
        sweep_graveyard();
    }
}
