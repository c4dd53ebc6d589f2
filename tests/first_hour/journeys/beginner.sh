# A beginner: a configuration by flags, a typo on the way, training, an interrupted and resumed run, and an answer.
# expect: wrote chats.yaml: models/tiny
# expect: zeromesh train chats.yaml
# expect: run.epoch is not a known key; did you mean run.epochs?
# expect: run.epochs = 2 takes
# expect: lowest validation loss
# expect: What is the capital of Norway?
# expect: no configuration file: models/tiny
python "$CLONE/examples/tiny_model.py" models/tiny --hidden-size 64
head -n 24 "$CLONE/examples/chat.jsonl" > chats.jsonl

zeromesh init models/tiny chats.jsonl --device cpu --full --output runs/chats
cat chats.yaml
test "$(wc -l < chats.yaml)" -lt 25

# The typo: a key that does not exist.
sed 's/epochs: 3/epoch: 2/' chats.yaml > typo.yaml
status=0; zeromesh train typo.yaml || status=$?
test "$status" -eq 2

sed -i 's/epochs: 3/epochs: 2/; s/save_every: 100/save_every: 2\n  keep_best: true/; s/evaluate_every: 50/evaluate_every: 2/' chats.yaml
sed -i 's/keep_last: 2/keep_last: 20/' chats.yaml
zeromesh train chats.yaml

# As if the run had been interrupted after step 2: the same command with --resume goes on.
echo global_step2 > runs/chats/checkpoints/latest
zeromesh train chats.yaml --resume
zeromesh sample runs/chats "What is the capital of Norway?" --chat --tokens 8
test -d runs/chats/checkpoints/best

# Without a file, with the same defaults.
zeromesh train models/tiny chats.jsonl --set run.output=runs/again --set run.epochs=0.1
