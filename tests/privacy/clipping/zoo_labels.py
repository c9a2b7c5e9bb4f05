"""106 tiny models of transformers and peft, and whether each keeps examples apart: written down before any was made to work.

A model mixes only where another example's input changes an example's loss, batch norm in training mode included
(`test_zoo.py` tries it). What draws random numbers, folds examples into another dimension or writes in place keeps them apart.
"""

APART = """
ViT, ViT for classes, DeiT, DeiT for classes, BEiT, BEiT with relative positions, BEiT with shared relative positions,
Data2VecVision, Data2VecVision with relative positions, ConvNeXt, ConvNeXtV2, DINOv2, DINOv2 with registers, DINOv2 with SwiGLU,
DINOv2 for classes, DINOv3 ViT, DINOv3 ConvNeXt, I-JEPA, ViT-MSN, ViT-MSN for classes, Hiera, PVT, PVTv2, SegFormer, FocalNet,
PoolFormer, Swin, Swin for classes, Swinv2, SAM, CLIP vision, CLIP for classes, SigLIP, SigLIP 2, AIMv2, DPT, ViTDet, ViT-MAE,
VideoMAE, V-JEPA 2, CLIP, ChineseCLIP, AltCLIP, MetaCLIP2, ViLT, ViT + GPT-2, TrOCR, BLIP, GIT, BLIP-2, Perceiver, Pix2Struct,
InternVL, SmolVLM, LLaVA, LLaVA with long text, PaliGemma, PaliGemma with long text, Qwen2-VL, Qwen2.5-VL, GPT-2, GPT-J, GPT-NeoX,
BLOOM, Llama with grouped queries, Llama tied with biases, Qwen2, Qwen3, Gemma2, Gemma3, VaultGemma, Phi-3, OLMo2, SmolLM3, OPT,
Falcon, Mixtral, gpt-oss, Mamba, T5, RoBERTa, BERT, ModernBERT, BART, LoRA on ViT, LoRA on GPT-2, DoRA on Llama, BiT,
ResNet with frozen batch norm, RegNet with frozen batch norm, MobileNetV2 with frozen batch norm,
MobileViT with frozen batch norm, MobileViTV2 with frozen batch norm, EfficientNet with frozen batch norm,
LeViT with frozen batch norm, CvT with frozen batch norm
"""
MIXES = """
ResNet, RegNet, MobileNetV2, MobileViT, MobileViTV2, EfficientNet, LeViT, CvT, SigLIP with its pairwise loss,
CLIP with its contrastive loss
"""
LABELS = {
    name.strip(): label
    for label, names in (("apart", APART), ("mixes", MIXES))
    for name in names.replace("\n", " ").split(",")
}
assert len(LABELS) == 106
