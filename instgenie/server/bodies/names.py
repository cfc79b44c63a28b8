"""The names that other servers give to settings of ours, for the hint in the error about an unknown field. Knows names
only: none of them is accepted, because the same word often has another range or direction elsewhere."""

from collections.abc import Collection

from instgenie.server.options import nearest

# names of AUTOMATIC1111, ComfyUI, diffusers, vLLM-Omni, SGLang, stable-diffusion.cpp, IOPaint and hosted services
OTHER_NAMES = {
    "num_inference_steps": "steps num_steps inference_steps sample_steps sampling_steps ddim_steps sd_steps ldm_steps",
    "guidance_scale": "cfg cfg_scale cfgscale guidance sd_guidance_scale txt_cfg text_guidance_scale "
    "distilled_guidance distilled_cfg_scale embedded_guidance_scale",
    "true_cfg_scale": "true_cfg true_guidance true_guidance_scale",
    "strength": "denoise denoising_strength denoise_strength sd_strength prompt_strength image_strength "
    "img2img_strength",
    "feather": "mask_blur mask_blur_x mask_blur_y sd_mask_blur blur_factor mask_feather",
    "n": "num_images_per_prompt num_outputs_per_prompt num_images num_outputs n_iter batch_size batch_count samples "
    "num_samples n_samples",
    "mask": "mask_image mask_url mask_img masks latent_mask mask_base64 mask_b64",
    "image": "init_image init_images init_img input_image input_images source_image src_image img image_b64 "
    "image_base64 b64_json file input_reference",
    "negative_prompt": "negative neg_prompt n_prompt negativeprompt",
    "prompt": "text instruction positive positive_prompt text_prompt",
    "seed": "noise_seed sd_seed random_seed generator",
    "size": "resolution image_size output_size",
    "output_format": "format image_format file_format output_type",
    "output_compression": "jpeg_quality output_quality compression",
    "deadline_ms": "timeout timeout_ms",
    "loras": "adapters lora_adapters lora_weights lora_list",
    "lora": "lora_name lora_path adapter adapter_name lora_id",
    "lora_scale": "lora_weight lora_strength adapter_weight",
    "controls": "controlnet controlnets control controlnet_units control_strength control_net",
    "masked_content": "inpainting_fill inpaint_fill fill_mode",
    "template": "template_id image_id file_id",
    "crop": "inpaint_full_res only_masked hd_strategy use_croper crop_mode",
    "crop_padding": "inpaint_full_res_padding padding_mask_crop only_masked_padding mask_padding "
    "hd_strategy_crop_margin crop_margin",
}
NO_COUNTERPART = {
    "the model uses its own sampler": "sampler sampler_name sampler_index sd_sampler ldm_sampler scheduler "
    "scheduler_name sample_method sampling_method use_karras_sigmas eta s_churn s_noise s_tmin s_tmax sigmas timesteps "
    "flow_shift",
    "the size of the answer is given by 'size', and its borders are painted": "use_extender",
    "masks always mark what to edit, by alpha 0 or by white": "inpainting_mask_invert invert_mask mask_invert",
    "'size' alone gives the size of the answer": "resize_mode aspect_ratio upscale enable_hr hr_scale enable_upscaling "
    "upscaling_scale",
    "the model is served as it is": "ip_adapter_image alwayson_scripts override_settings",
    "the model edits one picture and has no use for reference pictures": "reference_image reference_images ref_image "
    "ref_images paint_by_example_example_image",
}

OURS = {other: ours for ours, others in OTHER_NAMES.items() for other in others.split()}
REASONS = {other: reason for reason, others in NO_COUNTERPART.items() for other in others.split()}


def hint(name: str, known: Collection[str]) -> str:
    """Return what to append to the error about an unknown field. Spelling decides only for names in no table."""
    other = name.lower().removesuffix("[]").replace("-", "_")
    if OURS.get(other) in known:
        return f": it is called {OURS[other]!r} here."
    if other in OURS:
        return f": this request takes no {OURS[other]!r}."
    if other in REASONS:
        return f": it has no counterpart here, because {REASONS[other]}."
    return nearest(name, known) or "."
