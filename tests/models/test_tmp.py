import pytest, torch
from transformers import AutoModelForCausalLM
from exporting import *
@pytest.mark.parametrize("base", ["llama","mistral","qwen3","gpt2"])
@pytest.mark.parametrize("method", ["comigs-1g1s","fedit","fedavg",{"name":"floral","clusters":2},{"name":"comigs","specialists":[1,2,0]}])
def test_x(federate, method, base, tmp_path):
    run = trained(federate, method, base=f"random:{base}")
    for u in ("ann","bob"):
        p = run.user(u)
        for f in ("transformers","peft","merged-approximately", "gguf"):
            try:
                e = p.export(tmp_path/f"{u}{f}", format=f)
            except Exception as err:
                pass
                print(method, base, u, f, repr(err)); continue
            print(method, base, u, f, e.form, e.lost)
            if f=="transformers":
                same(p, AutoModelForCausalLM.from_pretrained(e.folder))
    print((tmp_path/"bobmerged-approximately"/"README.md").read_text())
