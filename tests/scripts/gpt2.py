"""Train a tiny GPT-2 from scratch with the Trainer of transformers."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH = 48, 16


class Counting(Dataset):
    """Sequences that count upwards in steps of one to three."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (count, 1), generator=generator)
        pace = torch.randint(1, 4, (count, 1), generator=generator)
        self.ids = (first + pace * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Printer(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print(f"step {state.global_step}: eval_loss={(metrics or {})['eval_loss']:.3f}")


def preprocess_logits(logits, labels):
    return logits.argmax(-1)


def compute_metrics(prediction):
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="gpt2-output")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    training = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=args.seed,
    )
    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Counting(400, seed=0),
        eval_dataset=Counting(80, seed=1),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits,
        callbacks=[Printer()],
    )
    trainer.train()
    print(trainer.evaluate()["eval_accuracy"])
    torch.save(model.state_dict(), f"{args.output_dir}/weights.pt")


if __name__ == "__main__":
    main()
