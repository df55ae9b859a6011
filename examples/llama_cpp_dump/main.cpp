// llama_cpp_dump MODEL.gguf OUT.ggmldump [--flash] [--gpu-layers N] ID ID ID ...
//
// Runs one prompt of token ids through llama.cpp, and writes the evaluation as a dump.

#include <cstdlib>
#include <string>
#include <vector>

#include "sqrtdk_dump.h"

int main(int argc, char ** argv) {
    std::vector<llama_token> ids;
    bool flash = false;
    int layers = 0;
    for (int i = 3; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--flash") {
            flash = true;
        } else if (word == "--gpu-layers" && i + 1 < argc) {
            layers = std::atoi(argv[++i]);
        } else {
            ids.push_back(std::atoi(argv[i]));
        }
    }
    if (ids.empty()) {
        std::fprintf(stderr, "usage: %s MODEL.gguf OUT.ggmldump [--flash] [--gpu-layers N] ID ...\n", argv[0]);
        return 2;
    }
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = false;
    model_params.n_gpu_layers = layers;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        return 1;
    }
    sqrtdk_dump dump(argv[2]);
    llama_context_params params = llama_context_default_params();
    const uint32_t count = (uint32_t) ids.size();
    params.n_ctx = (count + 255) / 256 * 256;
    params.n_batch = params.n_ubatch = count < 32 ? 32 : count;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.cb_eval = sqrtdk_dump::callback;
    params.cb_eval_user_data = &dump;
    llama_context * context = llama_init_from_model(model, params);
    if (!context || !dump.begin(model)) {
        return 1;
    }
    llama_batch batch = llama_batch_init((int32_t) count, 0, 1);
    batch.n_tokens = (int32_t) count;
    for (uint32_t i = 0; i < count; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = (llama_pos) i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;  // of all tokens
    }
    const bool good = llama_decode(context, batch) == 0 && dump.end();
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return good ? 0 : 1;
}
