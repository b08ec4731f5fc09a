"""The few-step sampler against the stock pipeline, and what its stop step really runs."""

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.modalities.diffusion.few_step import sample_until
from miles_dmd.models.sd3 import network as sd3
from miles_dmd.sampling.grid import sigma_grid

SHAPE = (4, 8, 8)
CPU = torch.device("cpu")
ARCHITECTURES = {
    "sd3": {"dual_attention_layers": (), "qk_norm": None},
    "sd3.5": {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
}
SCHEDULERS = {"renoise": FlowMatchLCMScheduler, "euler": FlowMatchEulerDiscreteScheduler}


def small_transformer(**features):
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
        **features,
    )
    # untrained modulation is near zero: make every part of the network count
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network.eval()


class CountingFamily:
    """The SD3 family that remembers the size and level of every forward."""

    def __init__(self):
        self.forwards = []

    def velocity(self, network, x, sigma, cond):
        self.forwards.append((len(x), sigma[0].item()))
        return sd3.velocity(network, x, sigma, cond)


def conditions(count):
    """Row r is the same whatever the count: torch.randn's first rows depend on how many follow."""
    rows = [torch.Generator().manual_seed(row) for row in range(count)]
    return {
        "encoder_hidden_states": torch.stack([torch.randn(5, 16, generator=row) for row in rows]),
        "pooled_projections": torch.stack([torch.randn(8, generator=row) for row in rows]),
    }


def sample(model, *, stop_steps, solver="renoise", steps=4, seeds=None):
    return sample_until(
        model,
        conditions(len(stop_steps)),
        seeds=seeds or list(range(len(stop_steps))),
        stop_steps=stop_steps,
        sigmas=sigma_grid(steps, 3.0),
        solver=solver,
        shape=SHAPE,
        device=CPU,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("solver", SCHEDULERS)
def test_sampler_equals_the_stock_pipeline(architecture, solver):
    network = small_transformer(**ARCHITECTURES[architecture])
    pipeline = StableDiffusion3Pipeline(
        transformer=network, scheduler=SCHEDULERS[solver](shift=3.0), vae=None,
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    cond = conditions(3)

    ours = sample(Denoiser(sd3, network), stop_steps=[3, 3, 3], solver=solver, seeds=[5, 6, 7]).clean

    for row, seed in enumerate([5, 6, 7]):
        # the pipeline re-noises from the global generator: seeded alike, it draws what our sample's own one draws
        torch.manual_seed(seed)
        theirs = pipeline(
            prompt_embeds=cond["encoder_hidden_states"][row : row + 1],
            pooled_prompt_embeds=cond["pooled_projections"][row : row + 1],
            latents=torch.randn(1, *SHAPE),
            sigmas=[1, 0.75, 0.5, 0.25],
            num_inference_steps=4,
            guidance_scale=1.0,
            height=64,
            width=64,
            output_type="latent",
        ).images
        torch.testing.assert_close(ours[row : row + 1], theirs, rtol=1e-4, atol=1e-5)


def test_forwards_beyond_the_stop_step_never_run():
    family = CountingFamily()

    sample(Denoiser(family, small_transformer()), stop_steps=[0, 2, 1, 0, 2])

    assert family.forwards == [(5, 1.0), (3, pytest.approx(0.9)), (2, pytest.approx(0.75))]


def test_stop_step_is_a_step_of_the_full_run():
    model = Denoiser(sd3, small_transformer())
    full = [sample(model, stop_steps=[k], seeds=[3]) for k in range(4)]

    mixed = sample(model, stop_steps=[0, 1, 2, 3], seeds=[3, 3, 3, 3])

    assert mixed.sigma.tolist() == pytest.approx([1, 0.9, 0.75, 0.5])
    # conditions differ by row, so compare row 0 with row 0: the same prompt, the same seed, another batch
    torch.testing.assert_close(mixed.latents[0], full[0].latents[0])
    torch.testing.assert_close(mixed.clean[0], full[0].clean[0], rtol=1e-4, atol=1e-5)


def test_sample_does_not_depend_on_its_batch():
    model = Denoiser(sd3, small_transformer())
    cond = conditions(4)
    together = sample(model, stop_steps=[3, 1, 2, 3], seeds=[11, 12, 13, 14])

    alone = sample_until(
        model, {name: value[2:3] for name, value in cond.items()}, seeds=[13], stop_steps=[2],
        sigmas=sigma_grid(4, 3.0), solver="renoise", shape=SHAPE, device=CPU,
    )  # fmt: skip

    torch.testing.assert_close(together.clean[2:3], alone.clean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.latents[2:3], alone.latents, rtol=1e-4, atol=1e-5)


def test_clean_prediction_comes_from_the_stopped_latents():
    model = Denoiser(sd3, small_transformer())

    stopped = sample(model, stop_steps=[0, 1, 2, 3])

    torch.testing.assert_close(
        model.clean(stopped.latents, stopped.sigma, conditions(4)), stopped.clean, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("step", [-1, 4])
def test_stop_step_outside_the_grid_is_refused(step):
    with pytest.raises(ValueError, match=r"outside \[0, 3\]"):
        sample(Denoiser(sd3, small_transformer()), stop_steps=[step])


def test_guidance_is_standard_and_scale_one_costs_one_branch():
    family = CountingFamily()
    model = Denoiser(family, small_transformer())
    x, sigma, cond = torch.randn(2, *SHAPE), torch.tensor([0.3, 0.8]), conditions(2)
    uncond = {name: torch.zeros_like(value) for name, value in cond.items()}

    guided = model.guided_velocity(x, sigma, cond, uncond, 3.0)
    plain = model.guided_velocity(x, sigma, cond, uncond, 1.0)

    with_prompt, without = model.velocity(x, sigma, cond), model.velocity(x, sigma, uncond)
    torch.testing.assert_close(guided, without + 3.0 * (with_prompt - without), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, with_prompt)
    assert [size for size, _ in family.forwards[:2]] == [4, 2]


def test_timestep_is_not_rounded_in_bf16():
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, hidden_states, timestep, **_):
            seen.append(timestep)
            return (hidden_states,)

    model = Denoiser(sd3, Spy(), torch.bfloat16)

    velocity = model.velocity(torch.randn(1, *SHAPE), torch.tensor([0.7501]), conditions(1))

    assert seen[0].dtype == torch.float32
    assert seen[0].item() == pytest.approx(750.1)
    assert velocity.dtype == torch.float32
