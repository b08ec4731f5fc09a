"""The digits: data, prompts, the map between images and 8x8 digits, a classifier and measures.

Everything that the teacher, the evaluation, hooks and tests share. Import it by path: examples are not a package.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = tuple(f"a handwritten {word}" for word in WORDS)
IMAGE_SIZE = 64  # pixels: the 8x8 digit, eight times larger; the latent is 8x8 again
LENGTH = 12  # tokens that every text encoder sees: CLIP and T5 alike, so that diffusers and SGLang agree
CLASSIFIER = HERE / "classifier.safetensors"

_SIZE = {"max_sequence_length": LENGTH, "height": IMAGE_SIZE, "width": IMAGE_SIZE}
TEACHER_CALL = {"num_inference_steps": 28, "guidance_scale": 2.0, **_SIZE}
STUDENT_CALL = {"num_inference_steps": 4, "guidance_scale": 1.0, "sigmas": [1.0, 0.75, 0.5, 0.25], **_SIZE}


def load_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: ink [1797, 8, 8] fp32 in [0, 1] (1 is ink) and labels [1797] int64.

    Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI, CC BY 4.0; the half of it that
    scikit-learn ships, so nothing is downloaded.
    """
    from sklearn.datasets import load_digits as bundled

    data = bundled()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target, dtype=torch.int64)


def label_of(prompt: str) -> int:
    """The digit that a prompt asks for. Raises ValueError for a prompt that asks for none of the ten."""
    if prompt not in PROMPTS:
        raise ValueError(f"prompt {prompt!r} asks for no digit: known are {PROMPTS[0]!r} .. {PROMPTS[-1]!r}")
    return PROMPTS.index(prompt)


def to_image(ink: Tensor) -> Tensor:
    """Ink [B, 8, 8] in [0, 1] -> RGB [B, 3, 64, 64] fp32 in [-1, 1], bright on black, the digit filling the frame."""
    large = F.interpolate(ink[:, None], size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", align_corners=False)
    return (large.clamp(0, 1) * 2 - 1).expand(-1, 3, -1, -1).contiguous()


def to_ink(image: Tensor) -> Tensor:
    """RGB [B, 3, H, W] in [-1, 1] -> ink [B, 8, 8] fp32 in [0, 1]: the mean over colours and over each cell."""
    return F.adaptive_avg_pool2d(image.float().mean(1, keepdim=True), 8)[:, 0].clamp(-1, 1) / 2 + 0.5


class Classifier(nn.Module):
    """A small CNN on ink [B, 8, 8]: `features` [B, 48] are what Frechet distances compare; forward gives [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.hidden = nn.Linear(48 * 16, 48)
        self.output = nn.Linear(48, 10)

    def features(self, ink: Tensor) -> Tensor:
        drop = F.dropout(self.convolutions(ink[:, None] * 2 - 1), 0.3, self.training)
        return F.relu(self.hidden(drop.flatten(1)))

    def forward(self, ink: Tensor) -> Tensor:
        return self.output(self.features(ink))

    @torch.no_grad()
    def normalise_features(self, ink: Tensor) -> None:
        """Scale features to a mean variance of 1 on ink, logits unchanged: a Frechet distance then has a unit."""
        scale = self.features(ink).var(0).mean().sqrt()
        self.hidden.weight /= scale
        self.hidden.bias /= scale
        self.output.weight *= scale


def split(count: int, held_out: float = 0.2) -> tuple[Tensor, Tensor]:
    """Indices to train on and indices held out, the same every time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    cut = round(count * (1 - held_out))
    return order[:cut], order[cut:]


def train_classifier(epochs: int = 40, seed: int = 0) -> tuple[Classifier, float]:
    """A classifier of images as the pipeline shows them (there and back again), and its held-out accuracy. Seconds."""
    ink, labels = load_digits()
    ink = to_ink(to_image(ink))
    train, test = split(len(ink))
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in train[torch.randperm(len(train))].split(64):
            # A little noise: the judge must not be upset by the grain of a decoded image.
            logits = model(ink[rows] + 0.1 * torch.randn(len(rows), 8, 8))
            loss = F.cross_entropy(logits, labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval().requires_grad_(False)
    model.normalise_features(ink)
    return model, accuracy(model, ink[test], labels[test])


def ensure_classifier(path: Path = CLASSIFIER) -> float:
    """Train and save the judge if there is none; its held-out accuracy. Two judges' measures cannot be compared."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if not path.is_file():
        model, held_out = train_classifier()
        save_file(model.state_dict(), path, metadata={"held_out_accuracy": f"{held_out:.4f}"})
    with safe_open(path, "pt") as file:
        return float(file.metadata()["held_out_accuracy"])


def shipped_classifier(path: Path = CLASSIFIER) -> Classifier:
    """The judge beside this file, frozen. Raises FileNotFoundError."""
    from safetensors.torch import load_file

    model = Classifier()
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(model: Classifier, ink: Tensor, labels: Tensor) -> float:
    """Share of ink [B, 8, 8] that the classifier reads as labels [B] say."""
    return (model(ink).argmax(1) == labels).float().mean().item()


@torch.no_grad()
def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Frechet distance between Gaussians fitted to features [N, D] and [M, D] (Heusel et al. 2017, eq. 6), in float64.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). The trace of the root is the sum of the roots of the eigenvalues of
    C1^(1/2) C2 C1^(1/2), which is symmetric: no complex root can appear.
    """
    a, b = first.double(), second.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    return max(distance.item(), 0.0)  # rounding can leave -1e-15


@torch.no_grad()
def spread(ink: Tensor, labels: Tensor) -> float:
    """Mean Euclidean distance between two samples [8, 8] of a prompt, averaged over prompts: diversity compares it."""
    distances = [torch.pdist(ink[labels == digit].flatten(1)).mean() for digit in labels.unique()]
    return torch.stack(distances).mean().item()
