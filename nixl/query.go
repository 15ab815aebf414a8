package nixl

import (
	"encoding/binary"
	"math"
)

// Query is memory or storage that a backend is asked about.
type Query struct {
	Desc
	Name string // what the backend goes by: the path of a file, the key of an object
}

// Query asks the backend about memory or storage: POSIX and OBJ tell whether the
// file or object of that name exists. It returns a map for each query in order, nil
// for what is not there; POSIX gives size, mode and mtime. A backend that knows
// nothing of the kind is ErrBackend.
//
// Implements:
//
//	nixl_capi_query_mem, nixl_capi_create_query_resp_list, nixl_capi_destroy_query_resp_list,
//	nixl_capi_query_resp_list_size, nixl_capi_query_resp_list_has_value,
//	nixl_capi_query_resp_list_get_params
func (b *Backend) Query(mem MemType, queries []Query) ([]map[string]string, error) {
	op := "query backend " + b.name
	if !mem.valid() {
		return nil, invalid(op, "the memory type %d does not exist", int32(mem))
	}
	if len(queries) > math.MaxInt32 {
		return nil, invalid(op, "%d queries are more than %d", len(queries), math.MaxInt32)
	}
	descs := make([]Desc, len(queries))
	var names []byte
	for i, q := range queries {
		if len(q.Name) > math.MaxInt32 {
			return nil, invalid(op, "the name of query %d has %d bytes", i, len(q.Name))
		}
		descs[i] = q.Desc
		names = append(binary.NativeEndian.AppendUint32(names, uint32(len(q.Name))), q.Name...)
	}
	if err := b.a.lock(op); err != nil {
		return nil, err
	}
	defer b.a.mu.Unlock()
	if b.mems>>mem&1 == 0 {
		return nil, invalid(op, "it does not serve %v", mem)
	}
	if len(queries) == 0 {
		return nil, nil
	}
	fields, st := rawQuery(b.a.h, b.h, mem, descs, names)
	if st < 0 {
		return nil, failed(op, "", st)
	}
	var answers []map[string]string
	for len(fields) > 0 {
		known, pairs := fields[0] == "y", fields[1:]
		n := 0
		for pairs[n] != "" {
			n += 2
		}
		answers = append(answers, nil)
		if known {
			answers[len(answers)-1] = pairMap(pairs[:n])
		}
		fields = pairs[n+1:]
	}
	if len(answers) != len(queries) {
		return nil, failed(op, "", statusGarbled)
	}
	return answers, nil
}
