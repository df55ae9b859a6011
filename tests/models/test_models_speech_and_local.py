"""Models whose inputs are of their own kind, run on inputs that are made for them: what the audit says of each."""

import pytest
import transformers as hf

from sqrtdk._check import check
from sqrtdk.models.inputs import make_inputs
from tests.hf.families import SEQ2SEQ, TEXT

LONG = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "type_vocab_size": 2,
}
SPEECH = {
    "vocab_size": 81,
    "hidden_size": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 32,
    "speech_decoder_postnet_units": 32,
    "speaker_embedding_dim": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "max_text_positions": 40,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("SpeechT5ForTextToSpeech", {"input_ids": (2, 40), "decoder_input_values": (2, 40, 8)}),
        ("SpeechT5ForSpeechToText", {"input_values": (2, 900), "decoder_input_ids": (2, 40)}),
        ("SpeechT5ForSpeechToSpeech", {"input_values": (2, 900), "decoder_input_values": (2, 40, 8)}),
        ("SpeechT5Model", {"input_values": (2, 40, 64), "decoder_input_values": (2, 40, 64)}),
    ],
)
def test_speecht5_gets_the_inputs_of_its_task(name, wanted, static):
    model = getattr(hf, name)(hf.SpeechT5Config(**SPEECH))
    made, _ = make_inputs(model, model.config, batch=2)
    assert {key: tuple(value.shape) for key, value in made.items() if key in wanted} == wanted
    report = check(model, batch=2, static=static)
    assert [judged.verdict for judged in report.calls] == ["exact"] * (2 + 2 * 2)
    assert [finding for finding in report.findings if finding.severity != "note"] == []


def nystromformer(**sizes):
    config = {key: value for key, value in LONG.items() if key != "attention_window"}
    return hf.NystromformerModel(hf.NystromformerConfig(**config, **sizes))


def test_nystromformer_takes_one_length_unless_every_token_is_a_landmark():
    model = nystromformer(num_landmarks=8, segment_means_seq_len=32)
    for asked in (None, 24):
        made, notes = make_inputs(model, model.config, seq_len=asked)
        assert made["input_ids"].shape == (1, 32)
        assert any("takes no other" in note for note in notes)
    model = nystromformer(num_landmarks=16, segment_means_seq_len=16)
    assert make_inputs(model, model.config, seq_len=24)[0]["input_ids"].shape == (1, 24)
    assert [judged.verdict for judged in check(model, seq_len=24).calls] == ["exact", "exact"]


LOCAL = {
    "longformer": lambda: hf.LongformerModel(hf.LongformerConfig(**LONG, attention_window=[8, 8])),
    "led": lambda: hf.LEDModel(
        hf.LEDConfig(
            **SEQ2SEQ, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=[8, 8]
        )
    ),
    "hiera": lambda: hf.HieraModel(
        hf.HieraConfig(embed_dim=32, image_size=[32, 32], depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8])
    ),
    "nystromformer": lambda: nystromformer(num_landmarks=8, segment_means_seq_len=32),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_what_is_not_read_is_neither_silent_nor_accused(name, static):
    model = LOCAL[name]()
    report = check(model, static=static, fail_on="unmeasured", seq_len=None if name == "hiera" else 32)
    assert {judged.verdict for judged in report.calls} <= {"exact", "unmeasured"}
    assert [f for f in report.findings if f.severity in ("fail", "critical")] == []
    unread = [judged for judged in report.calls if judged.verdict == "unmeasured"]
    assert all("0.25 *" in judged.call.formula or "0.1768 *" in judged.call.formula for judged in unread)
    assert bool(unread) <= bool(report.unjudged) == bool(report.exit_code)
    if name in ("longformer", "led") and unread:
        assert all(name in unread[0].reason for name in ("logits padded by chunks", "overwrite"))
