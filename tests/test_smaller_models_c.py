"""Snippets of 9.9.5 to 9.9.7 that cannot run in their pages, and their helpers on bad input."""

import copy

import pytest
import torch
from notebooks import ROOT
from torch import nn
from torch.nn import functional as F

from speedlab import count

UNIT = ROOT / "code-units" / "9.9-smaller-models"


@pytest.fixture
def unit(monkeypatch):
    """The unit's folder where its notebooks import from."""
    monkeypatch.syspath_prepend(UNIT)
    return UNIT


def distillation_loss(student, teacher, T=2.0):
    ours, theirs = (F.log_softmax(logits / T, dim=-1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * T * T


def small(layers=1):
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=50, dim=8, hidden_dim=16, n_layers=layers, n_heads=2,
                              max_position_embeddings=8)  # fmt: skip
    return DistilBertForSequenceClassification(config)


@pytest.fixture
def distil(tmp_path):
    """Train a student by the page's Trainer for one step and return what its weights are."""
    from transformers import Trainer, TrainingArguments

    class Distilled(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model, inputs, return_outputs=False, **options):
            outputs = model(**inputs)
            with torch.no_grad():
                theirs = self.teacher(**inputs).logits
            loss = 0.5 * outputs.loss + 0.5 * distillation_loss(outputs.logits, theirs)
            return (loss, outputs) if return_outputs else loss

    def run(student, teacher, **settings):
        draw = torch.Generator().manual_seed(0)
        rows = [
            {"input_ids": torch.randint(1, 50, (8,), generator=draw), "labels": torch.tensor(i % 2)} for i in range(4)
        ]
        arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
                                      optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **settings)  # fmt: skip
        trainer = Distilled(student, arguments, train_dataset=rows)
        trainer.teacher = teacher
        trainer.train()
        return [p.detach().clone() for p in student.parameters()]

    return run


def test_the_trainer_that_distils_trains_the_student_alone(distil):
    student, teacher = small(), small().eval()
    before = [[p.clone() for p in model.parameters()] for model in (student, teacher)]
    after = [distil(student, teacher), list(teacher.parameters())]
    moved = [not all(map(torch.equal, a, b)) for a, b in zip(before, after, strict=True)]
    assert moved == [True, False]


def test_the_trainer_that_distils_accumulates_to_the_same_update(distil):
    student, teacher = small().eval(), small().eval()
    student.config.seq_classif_dropout = student.config.dropout = 0
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twice = copy.deepcopy(student)
    whole = distil(student, teacher, per_device_train_batch_size=4)
    parts = distil(twice, teacher, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-4)


def test_a_teacher_inside_a_lightning_module_stays_in_eval_mode():
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()

        def training_step(self, batch, index):
            images, _ = batch
            with torch.no_grad():
                theirs = self.teacher.eval()(images)
            return distillation_loss(self.student(images), theirs)

    module = Module().train()
    assert module.teacher.training  # what the page warns of
    module.training_step((torch.randn(5, 4), None), 0).backward()
    assert not module.teacher.training
    assert module.teacher[0].weight.grad is None and module.student.weight.grad is not None


def test_cross_entropy_with_probabilities_has_the_gradient_of_the_divergence():
    ours, theirs = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    [short] = torch.autograd.grad(F.cross_entropy(ours, theirs.softmax(-1)), ours)
    [whole] = torch.autograd.grad(distillation_loss(ours, theirs, T=1), ours)
    assert short.norm() > 0.1
    torch.testing.assert_close(short, whole)


def test_a_student_of_every_other_layer_is_loaded_as_it_was_saved(tmp_path):
    from transformers import DistilBertForSequenceClassification

    teacher = small(layers=4).eval()
    student = copy.deepcopy(teacher)
    student.distilbert.transformer.layer = student.distilbert.transformer.layer[::2]
    student.config.n_layers = len(student.distilbert.transformer.layer)
    student.save_pretrained(tmp_path)
    loaded = DistilBertForSequenceClassification.from_pretrained(tmp_path).eval()
    tokens = torch.randint(1, 50, (3, 8))
    assert len(loaded.distilbert.transformer.layer) == 2
    torch.testing.assert_close(loaded(tokens).logits, student(tokens).logits)
    third = teacher.distilbert.transformer.layer[2].state_dict()
    assert all(torch.equal(x, third[name]) for name, x in loaded.distilbert.transformer.layer[1].state_dict().items())


def test_the_snippet_for_qlora_names_what_exists():
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    assert config.bnb_4bit_quant_type == "nf4" and callable(prepare_model_for_kbit_training)


def test_beside_16_bit_weights_lora_keeps_more_than_full_fine_tuning_unless_autocast_casts_its_input():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=40, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
                         num_attention_heads=2, use_cache=False)  # fmt: skip
    ids = torch.randint(40, (2, 64))

    def kept(autocast=False, **changed):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        if changed:
            model = get_peft_model(
                model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **changed)
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return count.saved_bytes(lambda: model(input_ids=ids, labels=ids).loss, model).bytes

    full = kept()
    assert kept(lora_dropout=0.0) > 1.2 * full and kept(autocast=True, lora_dropout=0.0) < 1.15 * full
    assert kept(lora_dropout=0.05) > kept(lora_dropout=0.0)


def test_all_linear_leaves_the_output_layer_of_a_language_model_alone():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    assert not any("lm_head" in name for name, p in adapted.named_parameters() if p.requires_grad)
    assert not any("lora" in name for name, _ in adapted.merge_and_unload().named_parameters())


def test_students_do_not_touch_each_other(unit):
    """Student 0 learns the same whether it is trained beside another one or beside itself."""
    import students

    pixels, rows = torch.rand(60, 64), torch.arange(60).expand(2, -1)
    targets = torch.stack([torch.arange(60) % 10, torch.zeros(60, dtype=torch.long)])
    one = students.train(F.cross_entropy, pixels, rows, targets, [1e-2], 5)
    two = students.train(F.cross_entropy, pixels, rows, targets[[0, 0]], [1e-2], 5)
    assert torch.allclose(one.hidden[0], two.hidden[0], atol=1e-6)
    assert not torch.allclose(one.hidden[1], two.hidden[1], atol=1e-3)


def test_rates_side_by_side_are_those_one_by_one_and_adams(unit):
    import students

    pixels, rows, targets = torch.rand(50, 64), torch.arange(50)[None], torch.arange(50)[None] % 10
    both = students.train(F.cross_entropy, pixels, rows, targets, [1e-2, 1e-3], 6)
    for i, rate in enumerate((1e-2, 1e-3)):
        alone = students.train(F.cross_entropy, pixels, rows, targets, [rate], 6)
        adam = students.Students(1, 64, 32, 10, torch.Generator().manual_seed(0))
        optimizer = torch.optim.Adam(adam.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / 6)))
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(adam(pixels[None])[0], targets[0]).backward()
            optimizer.step()
            schedule.step()
        for p, one, torchs in zip(both.parameters(), alone.parameters(), adam.parameters(), strict=True):
            torch.testing.assert_close(p[i], one[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(one, torchs, atol=1e-5, rtol=1e-4)


def test_a_repeated_mistake_is_the_teachers_own(unit):
    """Of two mistakes of the teacher the student repeats one; that it is wrong elsewhere does not count."""
    import students

    truth, taught = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 0])
    said = torch.tensor([[5, 1, 0, 3], [0, 1, 0, 0]])
    assert students.repeated(said[:1], truth, taught) == 50
    assert students.repeated(said, truth, taught.expand(2, -1)) == 75
    assert students.share(said, truth).tolist() == [50, 50]


def test_students_are_chosen_by_one_half_and_shown_by_the_other(unit):
    import students

    pixels, labels = torch.eye(10).repeat(6, 1), torch.arange(10).repeat(6)
    data = {"pixels": pixels, "test_pixels": pixels, "test_labels": labels, "steps": 60}
    losses = {None: F.cross_entropy, 4: lambda logits, labels: 0 * logits.sum()}  # the second teaches nothing
    said, temperature, _ = students.answers(losses, torch.arange(60).expand(2, -1), labels.expand(2, -1), **data)
    assert said.shape == (2, 30) and temperature is None
    assert students.share(said, labels[1::2]).min() > 90


def test_labels_and_tokens_of_the_short_reviews_belong_together(unit):
    import lora_parts
    import students

    texts, labels, unseen = students.short_reviews()
    assert len(texts) == len(labels) and texts.shape[1] == unseen.shape[1] == 16
    assert len(lora_parts.short_test_labels()) == len(unseen)


def test_weights_of_a_llama_follow_from_its_shapes(unit):
    import lora_parts

    blocks, norms, both_ends = 2 * (4 * 8 * 8 + 3 * 8 * 16), (2 * 2 + 1) * 8, 2 * 32_000 * 8
    adapters = 2 * 3 * (4 * (8 + 8) + 3 * (8 + 16))
    assert lora_parts.llama_sizes(8, 16, 2, 2, rank=3) == (blocks + norms + both_ends, blocks, adapters)
