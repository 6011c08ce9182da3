"""The catalogue: exact parameter counts, names, and models cut or read from files."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stepcast.inputs.source import FormatError
from stepcast.models import catalog
from stepcast.models.catalog import UnknownModelError, family_of, find_name, load_model, model_names
from tests.inputs.huggingface_configs import CONFIGS
from tests.inputs.test_huggingface import as_json

# Element counts of the published checkpoints.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-2": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "mpt-7b-alibi": 6_649_286_656,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "starcoder-15.5b": 15_517_456_384,
    "starcoder2-15b": 15_957_889_024,
    "internlm2-20b": 19_861_149_696,
    "yi-34b": 34_388_917_248,
    "codestral-mamba-7b": 7_285_403_648,
    "mamba-2.8b": 2_768_345_600,
    "falcon-mamba-7b": 7_272_665_088,
    "jamba-v0.1": 51_570_323_328,
    "jamba-1.5-mini": 51_570_323_328,
    "jamba-1.5-large": 398_555_145_696,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "minimax-m2": 228_689_764_864,
}

# Billions, total and active (embedding and head included), of models known by rounded counts.
ROUNDED = {
    "gpt3-175b": ("174.6", "174.6"),
    "megatron-22b": ("22.1", "22.1"),
    "megatron-530b": ("529.6", "529.6"),
    "megatron-1t": ("1008.0", "1008.0"),
    "megatron-1.7b": ("1.7", "1.7"),
    "megatron-3.6b": ("3.6", "3.6"),
    "megatron-7.5b": ("7.5", "7.5"),
    "megatron-18.4b": ("18.4", "18.4"),
    "megatron-39.1b": ("39.1", "39.1"),
    "megatron-76.1b": ("76.1", "76.1"),
    "megatron-145.6b": ("145.6", "145.6"),
    "megatron-310.1b": ("310.1", "310.1"),
    "nemotron-4-15b": ("15.6", "15.6"),
    "nemotron-4-340b": ("341.0", "341.0"),
    "nemotron-h-8b": ("8.1", "8.1"),
    "nemotron-h-47b": ("46.8", "46.8"),
    "nemotron-h-56b": ("56.3", "56.3"),
    "nemotron-nano-9b-v2": ("8.9", "8.9"),
    "nemotron-nano-12b-v2": ("12.3", "12.3"),
    "nemotron-3-nano-30b-a3b": ("31.6", "3.6"),
    "nemotron-3-super-120b-a12b": ("120.7", "12.8"),
    "nemotron-3-ultra-550b-a55b": ("549.3", "56.1"),
    "mamba2-1.3b": ("1.3", "1.3"),
    "mamba2-2.7b": ("2.7", "2.7"),
    "bamba-9b": ("9.8", "9.8"),
    "granite-4.0-h-small": ("32.2", "8.8"),
    "jamba-v0.1": ("51.6", "12.1"),
    "jamba-1.5-large": ("398.6", "94.1"),
    "qwen3-next-80b-a3b": ("79.7", "3.9"),
    "qwen3.5-397b-a17b": ("396.3", "17.3"),
    "qwen3.5-35b-a3b": ("34.7", "3.5"),
    "glm-5": ("743.9", "41.8"),
    "llama-4-maverick": ("400.7", "17.2"),
    "mpt-7b": ("6.7", "6.7"),
    "qwen2-57b-a14b": ("57.4", "14.2"),
    "gpt-oss-120b": ("116.8", "5.7"),
    "mixtral-8x7b": ("46.7", "12.9"),
    "deepseek-v3": ("671.0", "37.6"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exact(name: str) -> None:
    assert load_model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_in_billions(name: str) -> None:
    model = load_model(name)
    assert (f"{model.parameters / 1e9:.1f}", f"{model.active_parameters / 1e9:.1f}") == ROUNDED[name]


def test_index_and_families_agree() -> None:
    files = {path.stem for path in catalog.FOLDER.glob("*.toml")} - {catalog.INDEX}
    listed: dict[str, set[str]] = {}
    for name in model_names():
        listed.setdefault(family_of(name), set()).add(name)
    assert set(listed) == files
    for family, names in listed.items():
        text = (catalog.FOLDER / f"{family}.toml").read_text()
        groups = tomllib.loads(text)["family"]
        assert names == {name for group in groups for name in group["models"]}
        assert all(group["source"] for group in groups)


def test_every_model_builds_and_names_its_source() -> None:
    assert len(model_names()) >= 100
    for name in model_names():
        model = load_model(name)
        assert (model.name, bool(model.source)) == (name, True)
        assert model.active_parameters <= model.parameters


def test_no_spelling_means_two_models() -> None:
    index = tomllib.loads((catalog.FOLDER / "index.toml").read_text())
    spellings = [
        (catalog._plain(alias), name)
        for models in index.values()
        for name, aliases in models.items()
        for alias in (name, *aliases)
    ]
    owners: dict[str, set[str]] = {}
    for spelling, name in spellings:
        owners.setdefault(spelling, set()).add(name)
    assert [names for names in owners.values() if len(names) > 1] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLAMA 3.1 8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama31_8b", "llama-3.1-8b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("gpt3-1.3b", "gpt3-1.3b"),
        ("gpt3-13b", "gpt3-13b"),
        ("GPT2-large", "gpt2-large"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("MT-NLG 530B", "megatron-530b"),
        ("llama", None),
        ("", None),
        ("-", None),
    ],
)
def test_spelling_does_not_matter(text: str, name: str | None) -> None:
    assert find_name(text) == name


@pytest.mark.parametrize(("text", "layers"), [("llama3-70b-l12", 12), ("llama3.1-8b-8layers", 8)])
def test_cut_to_fewer_layers(text: str, layers: int) -> None:
    assert load_model(text).layers == layers


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(UnknownModelError, match=r"unknown model 'lama-3\.1-8b'.*did you mean llama-3\.1-8b"):
        load_model("lama-3.1-8b")
    with pytest.raises(UnknownModelError, match=r"did you mean qwen3-next-80b-a3b"):
        load_model("qwen3-next-80b")  # left off before its end
    with pytest.raises(UnknownModelError, match="no such file; 'stepcast list models' has"):
        load_model("zzzzzz")
    with pytest.raises(UnknownModelError, match="cannot be cut to 99"):
        load_model("llama3-8b-l99")


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3.1-8b"  # a path outranks the name it ends in
    folder.mkdir()
    (folder / "config.json").write_bytes(as_json(CONFIGS["llama-3.2-1b"]))
    assert load_model(folder).parameters == PARAMETERS["llama-3.2-1b"]
    assert load_model(folder / "config.json").parameters == PARAMETERS["llama-3.2-1b"]
    own = tmp_path / "own.toml"
    own.write_text("layers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 100\nmax_seq = 32\n")
    assert load_model(own).parameters == 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 6400 + 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 2", r"own\.toml: model own: lacks hidden, heads, vocab, max_seq$"),
        ("layrs = 2", r"unknown key layrs; did you mean layers\?"),
        ("zzzz = 2", "unknown key zzzz; known: name, layers"),
        ("layers = 'x'", "model own: layers must be a positive whole number"),
        ("layers = 2\nhidden = 64\nheads = 4\nvocab = 9\nmax_seq = 9", "lacks ffn"),
        ("layers = 2\nhidden = 64\nheads = 3\nffn = 9\nvocab = 9\nmax_seq = 9", "give head_dim"),
        ("layers = [2]", "layers must be a single value"),
        ("experts = 3", "experts must be a table"),
        ("experts = { many = 3 }", "many"),
        ("biases = ['wheels']", "wheels"),
        ("norm = 'batch'", "norm must be one of"),
        ("layers = ", "not valid TOML"),
    ],
)
def test_bad_toml_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model(own)


def test_bad_config_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text('{"model_type": "llama"}')
    with pytest.raises(FormatError, match=r"broken\.json: the llama config lacks hidden_size"):
        load_model(file)
    with pytest.raises(FormatError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)


def test_the_index_alone_loads_no_family_and_no_numpy() -> None:
    code = (
        "import sys; from stepcast.models import catalog; catalog.model_names();"
        "print(catalog._family.cache_info().misses, 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["0", "False"]
