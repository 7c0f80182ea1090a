"""A tiny classifier on SpectralXCiT and runs of mmengine's Runner on given batches."""

import itertools
import uuid

import pytest
import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from mmspectral.compat.checkpoints import use_safe_loading
from mmspectral.models import SpectralXCiT
from tests.helpers import log_lines

ARCH = dict(embed_dims=16, depth=3, num_heads=2, cls_attn_layers=1)


@pytest.fixture
def safe_loading(loaders):
    """Load as our tools do."""
    use_safe_loading()


class TinyClassifier(BaseModel):
    """Two classes; ``trouble(features, inputs)`` stands between backbone and head."""

    def __init__(self, conditioning=None, trouble=None, **kwargs):
        super().__init__()
        self.backbone = SpectralXCiT(arch=ARCH, patch_size=8, conditioning=conditioning, **kwargs)
        self.trouble = trouble
        self.head = nn.Linear(16, 2)

    def forward(self, inputs, labels=None, mode="tensor"):
        inputs = inputs.to(self.head.weight.dtype)
        features = self.backbone(inputs)[0]
        if self.trouble is not None:
            features = self.trouble(features, inputs)
        logits = self.head(features)
        return dict(loss=F.cross_entropy(logits.float(), labels)) if mode == "loss" else logits


class CpuAmpOptimWrapper(AmpOptimWrapper):
    """mmengine's, whose constructor asks for a GPU, with a loss scaler of the CPU."""

    def __init__(self, optimizer, scaler, **kwargs):
        OptimWrapper.__init__(self, optimizer, **kwargs)
        self._scale_update_param = None
        self.loss_scaler = scaler
        self.cast_dtype = torch.bfloat16


@pytest.fixture
def tiny_classifier():
    """The class itself, to derive from."""
    return TinyClassifier


@pytest.fixture
def classifier():
    """Return a function that builds the classifier, or a subclass ``kind``, with a fixed start."""

    def build(conditioning=None, kind=None, **kwargs):
        torch.manual_seed(0)
        model = (kind or TinyClassifier)(conditioning, **kwargs)
        model.init_weights()  # the Runner would draw anew
        return model

    return build


@pytest.fixture
def cpu_amp():
    """Return a function that builds an ``AmpOptimWrapper`` on the CPU: (optimizer, initial scale, ...)."""

    def build(optimizer, init_scale=1024.0, **kwargs):
        return CpuAmpOptimWrapper(optimizer, torch.amp.GradScaler("cpu", init_scale=init_scale), **kwargs)

    return build


@pytest.fixture
def images():
    """Return a function that makes n batches [2, 3, 24, 32], as one tensor."""

    def make(n):
        return torch.randn(n, 2, 3, 24, 32, generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture
def make_runner(tmp_path):
    """Return a function that builds a Runner for one epoch over the batches, with a checkpoint per iteration.

    Each has a work directory of its own: mmengine names the folder of a run's log by the second, and two runs
    of one second would write to one log.
    """
    directories = (tmp_path / f"run_{number}" for number in itertools.count())

    def build(model, batches, hooks, optim_wrapper=None, lr=0.05, epochs=1, resume_from=None, **kwargs):
        samples = [dict(inputs=image, labels=index % 2) for batch in batches for index, image in enumerate(batch)]
        if optim_wrapper is None:
            optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), **kwargs)
        return Runner(
            model,
            str(next(directories)),
            train_dataloader=DataLoader(samples, batch_size=2, shuffle=False),
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            optim_wrapper=optim_wrapper,
            default_hooks=dict(
                checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False),
                logger=dict(type="LoggerHook", interval=1),
            ),
            custom_hooks=hooks,
            load_from=resume_from,
            resume=resume_from is not None,
            experiment_name=uuid.uuid4().hex,
            default_scope="mmengine",
            randomness=dict(seed=0),
        )

    return build


@pytest.fixture
def logged():
    """Return a function that reads what a run logged of the hook."""
    return lambda runner: log_lines(runner.work_dir, "conditioning/seconds")


class Counter(BaseModel):
    """Its only weight is the number of its updates."""

    def __init__(self):
        super().__init__()
        self.updates = nn.Parameter(torch.zeros(()))

    def forward(self, inputs, mode="tensor"):
        return dict(loss=-self.updates) if mode == "loss" else [self.updates]


class Planned(BaseMetric):
    """The score that is planned for so many updates."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def process(self, data_batch, data_samples):
        self.results.append(int(data_samples[0]))

    def compute_metrics(self, results):
        return dict(acc=self.scores[results[0] - 1])


@pytest.fixture
def count():
    """Return a function that trains and validates one update per planned score, and returns the runner."""

    def train(work_dir, scores, checkpoint, hooks=(), **settings):
        model = Counter()
        loader = DataLoader([dict(inputs=torch.ones(1))], batch_size=1)
        runner = Runner(
            model,
            str(work_dir),
            train_dataloader=loader,
            train_cfg=dict(by_epoch=True, max_epochs=len(scores)),
            val_dataloader=loader,
            val_cfg=dict(),
            val_evaluator=Evaluator([Planned(scores)]),
            optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=1)),
            default_hooks=dict(logger=None, checkpoint=checkpoint),
            custom_hooks=list(hooks),
            experiment_name=uuid.uuid4().hex,
            default_scope="mmengine",
            **settings,
        )
        runner.train()
        return runner

    return train
