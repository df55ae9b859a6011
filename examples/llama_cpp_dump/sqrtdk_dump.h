// Writes a .ggmldump: one evaluation of a graph of ggml, for `sqrtdk check` and `sqrtdk diff`.
//
//     sqrtdk_dump dump("run.ggmldump");
//     llama_context_params params = llama_context_default_params();
//     params.cb_eval = sqrtdk_dump::callback;          // common_params and server: the same two fields
//     params.cb_eval_user_data = &dump;
//     ... llama_init_from_model(model, params) ...
//     dump.begin(model);                               // forgets what llama.cpp ran to try out its memory
//     llama_decode(context, batch);                    // one prompt, on an empty cache, in one ubatch
//     dump.end();
//
// It works with any backend: values are fetched by ggml_backend_tensor_get. Load the model with use_extra_bufts = false
// (llama-cli: --no-repack), because repacked weights can't be read back. Weights are written once, as they are stored.
// The file is a sequence of records, each a line of JSON and as many bytes as its "bytes" says.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

class sqrtdk_dump {
public:
    explicit sqrtdk_dump(const char * path) : path(path) {}

    ~sqrtdk_dump() {
        if (file) {
            std::fclose(file);
        }
    }

    // Opens the file, and writes what is known of the model.
    bool begin(const llama_model * model, const char * producer = "llama.cpp") {
        file = std::fopen(path.c_str(), "wb");
        if (!file) {
            return false;
        }
        nodes = 0;
        known.clear();
        std::fprintf(file, "{\"sqrtdk_ggml_dump\": 1, \"producer\": \"%s\", \"vocabulary\": %d, \"metadata\": {", producer,
                     llama_vocab_n_tokens(llama_model_get_vocab(model)));
        bool first = true;
        for (int i = 0; i < llama_model_meta_count(model); i++) {
            char key[256], value[256];
            llama_model_meta_key_by_index(model, i, key, sizeof(key));
            llama_model_meta_val_str_by_index(model, i, value, sizeof(value));
            std::fprintf(file, "%s%s: %s", first ? "" : ", ", quoted(key).c_str(), quoted(value).c_str());
            first = false;
        }
        std::fprintf(file, "}}\n");
        return true;
    }

    // Writes the end, without which the file counts as cut off. Returns false if anything failed.
    bool end() {
        if (!file || failed) {
            return false;
        }
        std::fprintf(file, "{\"end\": %d}\n", nodes);
        const bool good = std::fclose(file) == 0;
        file = nullptr;
        return good;
    }

    // Before a node runs its sources are written: ggml may reuse their memory. After it ran, the result of the last.
    static bool callback(ggml_tensor * tensor, bool ask, void * user) {
        auto * dump = static_cast<sqrtdk_dump *>(user);
        if (!dump->file) {
            return true;
        }
        if (!ask) {
            if (std::strncmp(tensor->name, "result_", 7) == 0) {
                dump->output(tensor);
            }
            return true;
        }
        for (const ggml_tensor * source : tensor->src) {
            dump->leaf(source);
        }
        dump->leaf(tensor->view_src);
        dump->line(tensor, "node", 0);
        dump->known.insert(tensor);
        dump->nodes++;
        return true;
    }

private:
    std::string path;
    FILE * file = nullptr;
    int nodes = 0;
    bool failed = false;
    std::set<const ggml_tensor *> known;

    void leaf(const ggml_tensor * tensor) {
        if (!tensor || known.count(tensor)) {
            return;
        }
        known.insert(tensor);
        leaf(tensor->view_src);
        const bool empty = tensor->view_src || std::strncmp(tensor->name, "cache_", 6) == 0 || !tensor->data;
        line(tensor, "tensor", empty ? 0 : ggml_nbytes(tensor));
        if (!empty) {
            values(tensor);
        }
    }

    void output(const ggml_tensor * tensor) {
        std::fprintf(file, "{\"output\": %llu, \"bytes\": %zu}\n", id(tensor), ggml_nbytes(tensor));
        values(tensor);
    }

    void values(const ggml_tensor * tensor) {
        std::vector<char> bytes(ggml_nbytes(tensor));
        if (tensor->buffer) {
            ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
        } else {
            std::memcpy(bytes.data(), tensor->data, bytes.size());
        }
        failed |= std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size();
    }

    void line(const ggml_tensor * t, const char * kind, size_t bytes) {
        std::fprintf(file, "{\"%s\": %llu, \"name\": %s, \"op\": \"%s\", \"type\": \"%s\", \"ne\": [%lld, %lld, %lld, %lld], ", kind,
                     id(t), quoted(t->name).c_str(), ggml_op_desc(t), ggml_type_name(t->type), (long long) t->ne[0],
                     (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3]);
        std::fprintf(file, "\"nb\": [%zu, %zu, %zu, %zu], \"params\": [", t->nb[0], t->nb[1], t->nb[2], t->nb[3]);
        for (int i = 0; i < 16; i++) {
            std::fprintf(file, "%s%d", i ? ", " : "", t->op_params[i]);
        }
        std::fprintf(file, "], \"src\": [");
        bool first = true;
        for (const ggml_tensor * source : t->src) {
            if (source) {
                std::fprintf(file, "%s%llu", first ? "" : ", ", id(source));
                first = false;
            }
        }
        std::fprintf(file, "]");
        if (t->view_src) {
            std::fprintf(file, ", \"root\": %llu, \"offset\": %zu", id(t->view_src), t->view_offs);
        }
        std::fprintf(file, ", \"bytes\": %zu}\n", bytes);
    }

    static unsigned long long id(const ggml_tensor * tensor) { return (unsigned long long) (uintptr_t) tensor; }

    static std::string quoted(const char * text) {
        std::string made = "\"";
        for (const char * c = text; *c; c++) {
            if (*c == '"' || *c == '\\') {
                made += '\\';
            }
            made += (unsigned char) *c < 32 || (unsigned char) *c > 126 ? '?' : *c;
        }
        return made + "\"";
    }
};
