from tests.runs.test_adapters import small_lora
from tests.deploy.in_process import *
import tempfile
def main():
    d=Path(tempfile.mkdtemp())
    f=InProcessFederation(d)
    r=f(model=small_lora,algorithm__name="ghbm"); s=run_serial(d/"serial",model=small_lora,algorithm__name="ghbm")
    assert r.summary["model_sha256"]==s.summary["model_sha256"] and r.records==s.records
    print(r.records[0]["bytes_up"],len(r.records[0]["cohort"]), list((d/"run").iterdir()))
main()
