"""A model of NeMo's toolkit. The toolkit does not install beside our torch: a stand-in has the functions that are used
of it, with the signatures of NeMo 2, so this shows our half of the conversation alone."""

from pathlib import Path
from typing import Any

from tests.support.training_runs import TrainingRuns

CLASSES = """
import json
import lightning.pytorch as lightning
import torch
from omegaconf import OmegaConf


class ModelPT(lightning.LightningModule):
    @classmethod
    def restore_from(cls, restore_path, map_location=None, trainer=None):
        assert open(restore_path).read() == "a model"
        return cls()

    def __init__(self):
        super().__init__()
        self.cfg = OmegaConf.create({"train_ds": {"sample_rate": 16000}})
        OmegaConf.set_struct(self.cfg, True)
        self.layer = torch.nn.Linear(1, 1)

    def setup_training_data(self, train_data_config):
        assert train_data_config.sample_rate == 16000 and train_data_config.shuffle
        rows = [json.loads(line) for line in open(train_data_config.manifest_filepath)]
        data = [torch.tensor([float(len(row["text"]))]) for row in rows]
        self.loader = torch.utils.data.DataLoader(data, train_data_config.batch_size)

    def train_dataloader(self):
        return self.loader

    def set_trainer(self, trainer):
        self.its_trainer = trainer

    def training_step(self, batch, index):
        return {"loss": self.layer(batch).square().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.cfg.optim.lr, weight_decay=self.cfg.optim.weight_decay)
"""
MANAGER = """
def exp_manager(trainer, cfg):
    assert not cfg["create_checkpoint_callback"] and not cfg["create_tensorboard_logger"], cfg
    print("experiment manager:", trainer.max_steps, flush=True)
"""


def test_a_model_of_the_toolkit_trains_and_goes_on(nemo: TrainingRuns, tmp_path: Path) -> None:
    for name, text in {"core/classes.py": CLASSES, "utils/exp_manager.py": MANAGER}.items():
        path = tmp_path / "toolkit/nemo" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    model = tmp_path / "some.nemo"
    model.write_text("a model")
    sizes: dict[str, Any] = {
        "model": str(model),
        "env": {"PYTHONPATH": str(tmp_path / "toolkit")},
        "gradient_accumulation": 2,
    }
    first = nemo.train(num_epochs=1, **sizes)
    assert "experiment manager: 10" in first.text()  # 80 rows by 4, two passes a step
    nemo.train(num_epochs=2, resume=True, **sizes)
    assert nemo.checkpoints().complete_steps() == [10, 20]
